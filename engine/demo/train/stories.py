"""Stories, poems and jokes, written for this project, that the demo model tells on request."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Story:
    """A short story; `subjects` are the words that ask for it, of which the first is its name."""

    subjects: tuple[str, ...]
    text: str


STORIES: tuple[Story, ...] = (
    Story(
        ("a cat", "a kitten", "cats", "a cat and the moon"),
        "A grey cat named Pepper lived above a bakery. Every night she sat on the roof and looked at the "
        "moon, because she was sure that it was a bowl of milk. One evening she climbed the tallest "
        "chimney and stretched out her paw. The moon was still too far away. Sad and cold, she climbed "
        "down again, and there, on the step of the bakery, stood a small white bowl. The baker had seen "
        "her waiting. Pepper drank the milk, and in the last drop she saw the moon, round and bright. "
        "From that night on she knew that some things come to you when you stop reaching and go home.",
    ),
    Story(
        ("a river", "a stream", "water", "a river that wanted to be fast"),
        "High in the mountains, a little river was born from melting snow. It wanted to be the fastest "
        "water in the world, so it rushed past every stone and never looked around. Then it came to a "
        "wide green valley, and the ground was flat. The river had to slow down. For the first time it "
        "heard the birds, saw the willows, and felt children wading at its edge. An old mill turned its "
        "wheel and said thank you. When the river reached the sea at last, the waves asked what it had "
        "seen. It told them nothing of the mountains. It talked all night about the valley.",
    ),
    Story(
        ("a robot", "robots", "a machine", "a robot that waters flowers"),
        "Bolt was a small robot who worked in a quiet greenhouse. His task was to water forty flowers, "
        "and he counted them every morning. One day he counted forty-one. A thin green weed had grown "
        "beside the door. Bolt's rules said nothing about weeds, so he thought for a long time, and then "
        "he gave it water too. Weeks passed, and the weed became a tall sunflower that shaded the others "
        "from the summer heat. When the gardener came back, she laughed and changed his rules. The new "
        "rule was short: water whatever grows. Bolt liked it very much, because it was the rule he "
        "already had.",
    ),
    Story(
        ("the sea", "the ocean", "a sailor", "a ship", "a boat"),
        "An old sailor named Mara kept a lamp in her window by the sea. Her ship was long gone, but she "
        "lit the lamp every evening out of habit. One stormy night a fishing boat lost its way among the "
        "rocks. The crew saw nothing but black water, until a tiny yellow light blinked on the shore. "
        "They turned the bow toward it and came safely into the harbour. In the morning the captain "
        "knocked on her door with a basket of fish. Mara said that she had done nothing at all. The "
        "captain smiled and answered that the best lamps never know whom they have led home.",
    ),
    Story(
        ("a dragon", "dragons", "a monster", "a small dragon"),
        "In a cave above the village lived a dragon called Ember, and she could not breathe fire. She "
        "could only make warm smoke, and the other dragons laughed. One winter the snow lay so deep that "
        "the village oven went out, and nobody could bake. Ember came down on quiet feet, put her nose "
        "into the oven, and breathed her warm smoke all night long. By dawn the bread had risen and baked "
        "to a golden brown. The children brought her the first loaf. Since then nobody in the village has "
        "asked for a dragon with fire. They say that a warm one is much more useful.",
    ),
    Story(
        ("a tree", "a forest", "the woods", "an oak tree"),
        "At the edge of a forest stood an oak that was afraid of autumn. Each year it held its leaves as "
        "tightly as it could, and each year the wind took them. A squirrel asked why the oak was so sad. "
        "The oak said that it was losing everything. The squirrel laughed and pointed at the ground, "
        "where the fallen leaves covered a hundred sleeping acorns like a blanket. In spring the acorns "
        "woke up, and a ring of tiny green oaks stood around the old tree. When the next autumn came, the "
        "oak let go of its leaves one by one, and it gave each of them a name.",
    ),
    Story(
        ("a star", "the stars", "the night", "the night sky", "space"),
        "There was once a star so small that nobody had given it a name. It shone as well as it could, "
        "but the great stars around it were brighter. One night a girl named Lena could not sleep, and "
        "she looked through a crack in her curtain. The crack was so thin that only one star fitted into "
        "it, and it was the small one. She told it about her day and wished it good night. After that she "
        "came every evening. The small star still has no name in the books, but it does not mind. In one "
        "window of the world, it is the only star in the sky.",
    ),
    Story(
        ("a dog", "a puppy", "dogs", "a lost dog"),
        "Biscuit was a brown dog who carried the newspaper to every house in the street. He was proud, "
        "for he had never lost a page. One foggy morning he could not see the doors, and the street was "
        "as white as milk. Biscuit sat down and closed his eyes. He smelled coffee at number one, roses "
        "at number two, and fresh paint at number three. Sniff by sniff he walked the whole street and "
        "brought every paper to the right door. When the fog lifted, the neighbours clapped. Biscuit only "
        "wagged his tail, because he had not noticed that the fog was gone.",
    ),
    Story(
        ("a clock", "time", "a clockmaker", "an old clock"),
        "In a small town there was a clock that was always five minutes late. The mayor wanted a new one, "
        "but the clockmaker, old Anton, asked for one more week. He took the clock apart and found "
        "nothing wrong. Then he sat on the square and watched. Because the clock was late, the baker had "
        "time to greet the teacher, the children had time to tie their shoes, and nobody ever missed the "
        "bus, since the driver looked at the same clock. Anton put the clock together exactly as it had "
        "been. He told the mayor that it was not late at all. It was merely generous.",
    ),
    Story(
        ("a mouse", "a king", "a queen", "a princess", "a brave mouse"),
        "A king was so afraid of thieves that he locked all his bread in a tower and swallowed the key. "
        "Soon the whole castle was hungry, and the king was hungry too. A mouse named Tilly lived in the "
        "wall of the tower. She pushed one crumb after another through a crack, and the cook gathered "
        "them in a bowl and made soup. The king ate it and wept, for no soup had ever tasted so good. He "
        "asked how he could thank the mouse. Tilly asked him to leave the door open. The tower has had no "
        "lock since that day, and nobody has ever stolen the bread, because now it is shared.",
    ),
)  # fmt: skip

# A story on these subjects does not exist; the model offers another one instead.
OTHER_SUBJECTS: tuple[str, ...] = (
    "a horse", "a wizard", "a pirate", "a knight", "a spaceship", "an astronaut", "a bear", "a fox",
    "a wolf", "a rabbit", "an elephant", "a lion", "a tiger", "a bird", "an owl", "a penguin", "a fish",
    "a whale", "a shark", "a snake", "a frog", "a turtle", "a teacher", "a doctor", "a detective",
    "a scientist", "a programmer", "a computer", "the internet", "a ghost", "a vampire", "a witch",
    "an alien", "aliens", "a unicorn", "a giant", "a fairy", "an island", "a mountain", "a desert",
    "a garden", "a flower", "a train", "a car", "a bicycle", "a house", "a castle", "a school",
    "a hospital", "a farmer", "a farm", "a cow", "a chicken", "a superhero", "love", "friendship", "war",
    "peace", "winter", "summer", "Christmas", "my grandmother", "my mother", "my brother", "two friends",
    "a boy", "a girl", "an old man", "a baby", "football", "a football team", "chess", "music", "a violin",
    "a painter", "a poet", "a book", "a library", "a letter", "a key", "a door", "a mirror", "a secret",
    "a treasure", "a map", "the future", "the past", "Paris", "London", "Rome", "a city", "a village",
    "a bridge", "a bus", "a cup of tea", "a cake", "bread", "an apple", "cheese", "a spider", "a bee",
    "an ant", "a butterfly", "a snail", "a hamster", "a squirrel", "a submarine", "a plane", "a pilot",
    "a nurse", "a chef", "a spy", "a thief", "a zombie", "dinosaurs", "a dinosaur", "a mermaid",
    "a samurai", "a ninja", "a cowboy", "a volcano", "the rain", "the snow",
)  # fmt: skip

POEMS: tuple[str, ...] = (
    "The water waits behind the gate,\nthe wheel is still, the hour is late.\n"
    "One hand, one turn, and down it flows,\nand in the town a window glows.",
    "A little light, a little word,\na door that opens, hardly heard,\n"
    "a cup of tea, a quiet day:\nthe best of things are small, they say.",
    "The rain came in without a knock\nand sat beside the kitchen clock.\n"
    "It stayed till noon, and when it went,\nthe garden knew just what it meant.",
)
HAIKU: tuple[str, ...] = (
    "Snow melts on the hill,\na small stream looks for the sea.\nThe gate stands open.",
    "An old lamp at dusk,\none moth circles and settles.\nThe night has begun.",
)
JOKES: tuple[str, ...] = (
    "Why did the computer go to the doctor? Because it had a virus.",
    "Why was the maths book so sad? Because it had too many problems.",
    "What do you call a bear with no teeth? A gummy bear.",
    "Why did the bicycle fall over? Because it was two tired.",
    "Why can a river never get lost? Because it always follows its bed.",
    "Why do bees hum? Because they have forgotten the words.",
)
