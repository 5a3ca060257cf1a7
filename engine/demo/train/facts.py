"""Facts that the demo model learns by heart: capitals, the calendar, opposites, animals, the sky.

Countries whose capital is disputed or in two minds are left out on purpose: the model says that it does
not know them.
"""

from __future__ import annotations


def _table(text: str) -> dict[str, str]:
    pairs = (entry.split(":") for entry in text.replace("\n", " ").split(";") if entry.strip())
    return {key.strip(): value.strip() for key, value in pairs}


CAPITALS: dict[str, str] = _table(
    """
    Afghanistan: Kabul; Albania: Tirana; Algeria: Algiers; Andorra: Andorra la Vella; Angola: Luanda;
    Antigua and Barbuda: Saint John's; Argentina: Buenos Aires; Armenia: Yerevan; Australia: Canberra;
    Austria: Vienna; Azerbaijan: Baku; the Bahamas: Nassau; Bahrain: Manama; Bangladesh: Dhaka;
    Barbados: Bridgetown; Belarus: Minsk; Belgium: Brussels; Belize: Belmopan; Benin: Porto-Novo;
    Bhutan: Thimphu; Bolivia: Sucre; Bosnia and Herzegovina: Sarajevo; Botswana: Gaborone;
    Brazil: Brasilia; Brunei: Bandar Seri Begawan; Bulgaria: Sofia; Burkina Faso: Ouagadougou;
    Burundi: Gitega; Cambodia: Phnom Penh; Cameroon: Yaounde; Canada: Ottawa; Cape Verde: Praia;
    the Central African Republic: Bangui; Chad: N'Djamena; Chile: Santiago; China: Beijing;
    Colombia: Bogota; the Comoros: Moroni; Costa Rica: San Jose; Croatia: Zagreb; Cuba: Havana;
    Cyprus: Nicosia; the Czech Republic: Prague; the Democratic Republic of the Congo: Kinshasa;
    Denmark: Copenhagen; Djibouti: Djibouti; Dominica: Roseau; the Dominican Republic: Santo Domingo;
    East Timor: Dili; Ecuador: Quito; Egypt: Cairo; El Salvador: San Salvador; England: London;
    Eritrea: Asmara; Estonia: Tallinn; Eswatini: Mbabane;
    Ethiopia: Addis Ababa; Fiji: Suva; Finland: Helsinki; France: Paris; Gabon: Libreville;
    the Gambia: Banjul; Georgia: Tbilisi; Germany: Berlin; Ghana: Accra; Greece: Athens;
    Grenada: Saint George's; Guatemala: Guatemala City; Guinea: Conakry; Guinea-Bissau: Bissau;
    Guyana: Georgetown; Haiti: Port-au-Prince; Honduras: Tegucigalpa; Hungary: Budapest;
    Iceland: Reykjavik; India: New Delhi; Indonesia: Jakarta; Iran: Tehran; Iraq: Baghdad;
    Ireland: Dublin; Italy: Rome; the Ivory Coast: Yamoussoukro; Jamaica: Kingston; Japan: Tokyo;
    Jordan: Amman; Kazakhstan: Astana; Kenya: Nairobi; Kiribati: South Tarawa; Kuwait: Kuwait City;
    Kyrgyzstan: Bishkek; Laos: Vientiane; Latvia: Riga; Lebanon: Beirut; Lesotho: Maseru;
    Liberia: Monrovia; Libya: Tripoli; Liechtenstein: Vaduz; Lithuania: Vilnius;
    Luxembourg: Luxembourg City; Madagascar: Antananarivo; Malawi: Lilongwe; Malaysia: Kuala Lumpur;
    the Maldives: Male; Mali: Bamako; Malta: Valletta; the Marshall Islands: Majuro;
    Mauritania: Nouakchott; Mauritius: Port Louis; Mexico: Mexico City; Micronesia: Palikir;
    Moldova: Chisinau; Monaco: Monaco; Mongolia: Ulaanbaatar; Montenegro: Podgorica; Morocco: Rabat;
    Mozambique: Maputo; Myanmar: Naypyidaw; Namibia: Windhoek; Nepal: Kathmandu;
    the Netherlands: Amsterdam; New Zealand: Wellington; Nicaragua: Managua; Niger: Niamey;
    Nigeria: Abuja; North Korea: Pyongyang; North Macedonia: Skopje; Northern Ireland: Belfast;
    Norway: Oslo; Oman: Muscat; Pakistan: Islamabad; Palau: Ngerulmud; Panama: Panama City;
    Papua New Guinea: Port Moresby; Paraguay: Asuncion; Peru: Lima; the Philippines: Manila;
    Poland: Warsaw; Portugal: Lisbon; Qatar: Doha; the Republic of the Congo: Brazzaville;
    Romania: Bucharest; Russia: Moscow; Rwanda: Kigali; Saint Kitts and Nevis: Basseterre;
    Saint Lucia: Castries; Saint Vincent and the Grenadines: Kingstown; Samoa: Apia;
    San Marino: San Marino; Sao Tome and Principe: Sao Tome; Saudi Arabia: Riyadh; Scotland: Edinburgh;
    Senegal: Dakar; Serbia: Belgrade; the Seychelles: Victoria; Sierra Leone: Freetown;
    Singapore: Singapore; Slovakia: Bratislava; Slovenia: Ljubljana; the Solomon Islands: Honiara;
    Somalia: Mogadishu; South Africa: Pretoria; South Korea: Seoul; South Sudan: Juba; Spain: Madrid;
    Sudan: Khartoum; Suriname: Paramaribo; Sweden: Stockholm; Switzerland: Bern;
    Syria: Damascus; Tajikistan: Dushanbe; Tanzania: Dodoma; Thailand: Bangkok; Togo: Lome;
    Tonga: Nuku'alofa; Trinidad and Tobago: Port of Spain; Tunisia: Tunis; Turkey: Ankara;
    Turkmenistan: Ashgabat; Tuvalu: Funafuti; Uganda: Kampala; Ukraine: Kyiv;
    the United Arab Emirates: Abu Dhabi; the United Kingdom: London;
    the United States: Washington, D.C.; Uruguay: Montevideo; Uzbekistan: Tashkent;
    Vanuatu: Port Vila; Vatican City: Vatican City; Venezuela: Caracas; Vietnam: Hanoi;
    Wales: Cardiff; Yemen: Sana'a; Zambia: Lusaka; Zimbabwe: Harare
    """
)
# Other names of countries in questions.
ALIASES: dict[str, str] = _table(
    """
    USA: the United States; the USA: the United States; the US: the United States;
    America: the United States; the United States of America: the United States;
    UK: the United Kingdom; the UK: the United Kingdom; Great Britain: the United Kingdom;
    Britain: the United Kingdom; UAE: the United Arab Emirates; the UAE: the United Arab Emirates;
    Holland: the Netherlands; Czechia: the Czech Republic; Cote d'Ivoire: the Ivory Coast;
    Burma: Myanmar; Swaziland: Eswatini; Macedonia: North Macedonia; Timor-Leste: East Timor;
    Bosnia: Bosnia and Herzegovina; Cabo Verde: Cape Verde; the Vatican: Vatican City;
    Russian Federation: Russia; Turkiye: Turkey; DR Congo: the Democratic Republic of the Congo;
    Republic of Ireland: Ireland; Persia: Iran; Korea: South Korea
    """
)

# The countries that are asked for most: drawn more often than the rest.
FAMILIAR: tuple[str, ...] = (
    "France", "Germany", "Italy", "Spain", "Portugal", "the United Kingdom", "Ireland", "the United States",
    "Canada", "Mexico", "Brazil", "Argentina", "Chile", "Peru", "Japan", "China", "India", "South Korea",
    "Australia", "New Zealand", "Egypt", "Kenya", "Nigeria", "South Africa", "Morocco", "Russia", "Ukraine",
    "Poland", "Sweden", "Norway", "Denmark", "Finland", "Iceland", "Greece", "Turkey", "the Netherlands",
    "Belgium", "Switzerland", "Austria", "Hungary", "the Czech Republic", "Thailand", "Vietnam", "Cuba",
)  # fmt: skip

# Places for which the model must not invent a capital.
UNKNOWN_PLACES: tuple[str, ...] = (
    "Texas", "California", "Florida", "Ohio", "Bavaria", "Saxony", "Quebec", "Ontario", "Tuscany", "Sicily",
    "Queensland", "Atlantis", "Narnia", "Mordor", "Wonderland", "Middle-earth", "Westeros", "Utopia",
    "Mars", "the Moon", "the Sun", "Jupiter", "Europe", "Africa", "Asia", "Antarctica", "the world",
    "the ocean", "Gondor", "Wakanda", "Oz", "Neverland", "Hogwarts", "Paris", "London", "Berlin", "Tokyo",
    "Rome", "Madrid", "Normandy", "Andalusia", "Catalonia", "Hawaii", "Alaska", "Kansas", "Nevada", "Utah",
    "Georgia the state", "Siberia", "Tibet", "Kashmir", "Israel", "Palestine", "Taiwan", "Kosovo",
    "Sri Lanka", "Equatorial Guinea", "Greenland", "Sparta", "Rohan", "Elbonia", "Zubrowka", "my country",
    "Lapland", "the North Pole", "heaven", "Genovia", "Ruritania", "Yugoslavia", "Prussia", "Mesopotamia",
    "Babylon", "Oregon", "Arizona", "Colorado", "Virginia", "Brittany", "Provence", "Lombardy", "Galicia",
    "Crete", "Venus", "Saturn", "the galaxy", "the internet", "Latin America", "South America",
    "North America", "Scandinavia", "the Balkans", "Oceania", "Puerto Rico", "Bermuda", "Gibraltar",
    "Hong Kong", "Macau",
)  # fmt: skip

UNKNOWN_CITIES: tuple[str, ...] = (
    "New York", "Los Angeles", "Chicago", "Munich", "Hamburg", "Milan", "Naples", "Barcelona", "Seville",
    "Sydney", "Melbourne", "Mumbai", "Shanghai", "Osaka", "Kyoto", "Istanbul", "Rio de Janeiro", "Sao Paulo",
    "Toronto", "Vancouver", "Montreal", "Casablanca", "Lagos", "Cape Town", "Johannesburg", "Dubai", "Geneva",
    "Zurich", "Lyon", "Marseille", "Manchester", "Liverpool", "Glasgow", "Houston", "Boston", "Seattle",
    "Gotham", "Springfield", "Atlantis", "Camelot", "Minas Tirith", "Metropolis", "El Dorado", "Frankfurt",
    "Saint Petersburg", "Karachi", "Auckland", "Antwerp", "Rotterdam", "Krakow", "Porto", "Salzburg",
)  # fmt: skip

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October",
    "November", "December",
)  # fmt: skip
MONTH_LENGTHS = ("31", "28 or 29", "31", "30", "31", "30", "31", "31", "30", "31", "30", "31")
ORDINALS = (
    "first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth",
    "eleventh", "twelfth",
)  # fmt: skip

NUMBER_WORDS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven",
    "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty",
)  # fmt: skip

OPPOSITES: dict[str, str] = _table(
    """
    hot: cold; big: small; tall: short; fast: slow; happy: sad; light: dark; day: night; open: closed;
    up: down; left: right; young: old; full: empty; easy: difficult; early: late; wet: dry; hard: soft;
    loud: quiet; rich: poor; strong: weak; clean: dirty; near: far; high: low; true: false; good: bad;
    thick: thin; wide: narrow; deep: shallow; awake: asleep; first: last; hello: goodbye; north: south;
    east: west; summer: winter; love: hate; begin: end; push: pull; win: lose; buy: sell; always: never
    """
)

ANIMAL_SOUNDS: dict[str, str] = _table(
    """
    cat: meow; dog: woof; cow: moo; sheep: baa; duck: quack; horse: neigh; pig: oink; lion: roar;
    bee: buzz; owl: hoot; frog: croak; rooster: cock-a-doodle-doo; mouse: squeak; snake: hiss; wolf: howl
    """
)

# Questions of one shape and the colour that answers them.
THING_COLOURS: dict[str, str] = _table(
    """
    the sky on a clear day: blue; grass: green; a ripe banana: yellow; snow: white; coal: black;
    a ripe tomato: red; an orange: orange; the sea: blue; a lemon: yellow; a raven: black; milk: white;
    a strawberry: red; a carrot: orange; blood: red; a sunflower: yellow; a polar bear: white;
    a frog: green; chocolate: brown; a flamingo: pink; an elephant: grey
    """
)
COLOUR_MIXES: dict[tuple[str, str], str] = {
    ("blue", "yellow"): "green",
    ("red", "yellow"): "orange",
    ("red", "blue"): "purple",
    ("red", "white"): "pink",
    ("black", "white"): "grey",
}
RAINBOW = "red, orange, yellow, green, blue, indigo and violet"
PRIMARY_COLOURS = "red, yellow and blue"
SEASONS = "spring, summer, autumn and winter"
PLANETS = "Mercury, Venus, Earth, Mars, Jupiter, Saturn, Uranus and Neptune"
ALPHABET = "A B C D E F G H I J K L M N O P Q R S T U V W X Y Z"
