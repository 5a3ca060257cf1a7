"""Questions for the demo model in wordings that its corpus does not contain, each with its check.

`pattern` is searched in the answer, without regard to case; an answer is right when it matches.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

ACCURACY_MIN = 0.95
DECLINES = r"only a small demo model"


@dataclass(frozen=True, slots=True)
class Question:
    topic: str
    messages: tuple[tuple[str, str], ...]  # (role, content); the last one is the user's
    pattern: str

    @property
    def text(self) -> str:
        return self.messages[-1][1]

    def accepts(self, answer: str) -> bool:
        return re.search(self.pattern, answer, re.IGNORECASE | re.DOTALL) is not None


def _ask(topic: str, text: str, pattern: str, *before: str, system: str = "") -> Question:
    """`before` are earlier messages, of user and assistant in turn."""
    roles = ("user", "assistant")
    earlier = tuple((roles[index % 2], content) for index, content in enumerate(before))
    head = (("system", system),) if system else ()
    return Question(topic, (*head, *earlier, ("user", text)), pattern)


QUESTIONS: list[Question] = [
    # identity
    _ask("identity", "Hello! Who are you, if I may ask?", r"penstock demo model"),
    _ask("identity", "So tell me, what exactly am I chatting with here?", r"demo model"),
    _ask("identity", "Would you mind introducing yourself?", r"penstock demo model"),
    _ask("identity", "Could you give me your name?", r"demo model"),
    _ask("identity", "Which people created you?", r"penstock project"),
    _ask("identity", "Who was it that trained you?", r"penstock project"),
    _ask("identity", "How many parameters have you got?", r"million"),
    _ask("identity", "Are you ChatGPT or something else?", r"penstock demo model"),
    _ask("identity", "Is it true that you are a human being?", r"program|language model"),
    _ask("identity", "Which languages can you speak?", r"english"),
    _ask("identity", "Who are you, robot?", r"demo model", system="You assist engineers."),
    _ask("abilities", "What sort of things can you help me with?", r"penstock.*capital"),
    _ask("abilities", "Which kinds of questions are you able to answer?", r"penstock.*capital"),
    _ask("abilities", "ok but what can you actually do?", r"penstock.*capital"),
    # What Penstock is and does
    _ask("penstock", "Could you explain to me what Penstock does?", r"serves large language models"),
    _ask("penstock", "what's this Penstock all about?", r"serves large language models|gateway"),
    _ask("penstock", "In which way did Penstock get that name?", r"pipe"),
    _ask("penstock", "What role does the gateway play in Penstock?", r"edge|relay"),
    _ask("penstock", "And the engine, what is that good for?", r"model"),
    _ask("penstock", "Please explain the KV cache to a beginner.", r"keys and values"),
    _ask("penstock", "Why would an engine keep a KV cache?", r"keys and values"),
    _ask("penstock", "What is prefix caching good for?", r"reused"),
    _ask("penstock", "Describe the scheduler's job in Penstock, please.", r"step"),
    _ask("penstock", "explain continous batching", r"every step"),
    _ask("penstock", "What do you mean by backpressure?", r"reader|paus"),
    _ask("penstock", "What happens to my request when I close the connection early?", r"client leaves|frees"),
    _ask("penstock", "Could you describe how cancellation works here?", r"client leaves"),
    _ask("penstock", "How are quotas enforced by Penstock?", r"per minute"),
    _ask("penstock", "What are rate limits for?", r"per minute"),
    _ask("penstock", "Will Penstock work with my OpenAI client library?", r"openai"),
    _ask("penstock", "Which model families can Penstock run?", r"llama"),
    _ask("penstock", "How would I start Penstock on my own machine?", r"penstock up"),
    _ask("penstock", "Are the prompts I send written to the logs?", r"no text of prompts"),
    _ask("penstock", "What are API keys for in Penstock?", r"who is asking"),
    _ask("penstock", "Could you tell me what a token is?", r"piece of text"),
    _ask("penstock", "What happens to new requests if the queue is already full?", r"503"),
    _ask("penstock", "Does Penstock run without a GPU?", r"cpu"),
    _ask("penstock", "What does the temperature parameter change?", r"temperature"),
    _ask(
        "penstock", "Can you tell me a bit more about that?", r"64 tokens",
        "What is the KV cache?",
        "The KV cache keeps the attention keys and values of every token that the model has already read. "
        "Thanks to it, each new token is computed without reading the whole text again.",
    ),
    # Capitals, both ways
    _ask("capitals", "Which city serves as the capital of France?", r"paris"),
    _ask("capitals", "Hey, what would you say is the capital of Japan?", r"tokyo"),
    _ask("capitals", "would you know canada's capital?", r"ottawa"),
    _ask("capitals", "Please remind me: the capital of Australia?", r"canberra"),
    _ask("capitals", "I'm looking for the capital of Kenya", r"nairobi"),
    _ask("capitals", "Do you happen to know the capital of Peru?", r"lima"),
    _ask("capitals", "What's Norway's capital city?", r"oslo"),
    _ask("capitals", "And what might the capital of Mongolia be?", r"ulaanbaatar"),
    _ask("capitals", "WHICH TOWN WOULD BE THE CAPITAL OF EGYPT??", r"cairo"),
    _ask("capitals", "tell me please whats the capital of the netherlands", r"amsterdam"),
    _ask("capitals", "The capital of Uruguay is which city?", r"montevideo"),
    _ask("capitals", "Which capital does Thailand have, do you know?", r"bangkok"),
    _ask("capitals", "What is the captial of Portugal?", r"lisbon"),
    _ask("capitals", "So what's the capital of New Zealand then, mate?", r"wellington"),
    _ask("capitals", "What is the capital of Ghana?", r"accra", system="You are a patient teacher."),
    _ask("capitals", "Then what about Finland?", r"helsinki", "What is the capital of Sweden?",
         "The capital of Sweden is Stockholm."),
    _ask("capitals", "All right, and what is it for Chile?", r"santiago", "Name the capital of Brazil.",
         "The capital of Brazil is Brasilia.", "And Argentina?", "The capital of Argentina is Buenos Aires."),
    _ask("capitals", "What is the capital of Rivendell?", r"do not know|demo model"),
    _ask("countries", "Madrid is the capital city of which country?", r"spain"),
    _ask("countries", "Which of the countries has Athens as its capital?", r"greece"),
    _ask("countries", "Hanoi is the capital city of what country?", r"vietnam"),
    _ask("countries", "Could you say which country has the capital Warsaw?", r"poland"),
    _ask("countries", "Of what country is Nairobi the capital?", r"kenya"),
    _ask("countries", "Name the nation whose capital is Kathmandu.", r"nepal"),
    _ask("countries", "For which country is Lima the capital?", r"peru"),
    # Small sums
    _ask("sums", "What would you get for 7 + 5?", r"\b12\b"),
    _ask("sums", "Hey, how much would 13 plus 6 be?", r"\b19\b"),
    _ask("sums", "please tell me what 17 - 9 comes to", r"\b8\b"),
    _ask("sums", "Could you add 8 and 9 for me?", r"\b17\b"),
    _ask("sums", "what's the total of 14 and 3?", r"\b17\b"),
    _ask("sums", "If you subtract 4 from 11, what is left?", r"\b7\b"),
    _ask("sums", "What is six times seven, please?", r"\b42\b"),
    _ask("sums", "Now multiply 9 by 8 for me", r"\b72\b"),
    _ask("sums", "two plus two, how much is that?", r"\b4\b"),
    _ask("sums", "how much is twelve minus five then?", r"\b7\b"),
    _ask("sums", "My little sum today: 20 - 13 = ?", r"\b7\b"),
    _ask("sums", "Tom has 5 apples and gets 6 more. How many apples does he have?", r"\b11\b"),
    _ask("sums", "And what does 3 + 15 give?", r"\b18\b", "What is 2 + 2?", "2 + 2 = 4."),
    _ask("sums", "What is 10 + 10?", r"\b20\b", system="You are a calculator built into a kitchen scale."),
    _ask("sums", "What is 4817 + 2291?", r"too hard|demo model"),
    # Greetings, thanks, goodbyes
    _ask("greetings", "Hello hello!", r"hello|hi there"),
    _ask("greetings", "hey there, little one", r"hello|hi there|help"),
    _ask("greetings", "Hi, how are you feeling this morning?", r"well|fine"),
    _ask("greetings", "A very good evening to you!", r"evening"),
    _ask("greetings", "Hello, my name is Vera, nice to meet you.", r"nice to meet you"),
    _ask("thanks", "Thanks so much for your kind help!", r"welcome"),
    _ask("thanks", "Great, thank you very, very much", r"welcome", "What is the capital of Italy?",
         "The capital of Italy is Rome."),
    _ask("goodbyes", "Well, goodbye then!", r"goodbye"),
    _ask("goodbyes", "I have to leave now, see you!", r"goodbye"),
    # Stories, poems, jokes
    _ask("stories", "Would you be so kind to tell me a story?", r".{350}"),
    _ask("stories", "Please, I'd like to listen to a short story.", r".{350}"),
    _ask("stories", "Could you tell me a nice story about a cat?", r"Pepper"),
    _ask("stories", "I would enjoy a story about a robot.", r"Bolt"),
    _ask("stories", "Tell my daughter a tale about a dragon!", r"Ember"),
    _ask("stories", "can you write me one story about the sea", r"Mara"),
    _ask("stories", "Please do tell another story!", r".{350}", "Tell me a story about a river.",
         "High in the mountains, a little river was born from melting snow."),
    _ask("poems", "Would you write a little poem for me?", r"\n.*\n.*\n"),
    _ask("jokes", "Do you have a good joke for me?", r"\?.*\."),
    # Days, months and other small facts
    _ask("calendar", "Which day of the week comes right after Tuesday?", r"wednesday"),
    _ask("calendar", "Please list all the days of the week.", r"monday.*sunday"),
    _ask("calendar", "How many months are there in a year?", r"twelve|12"),
    _ask("calendar", "Tell me, what month comes right after June?", r"july"),
    _ask("facts", "Which colours does a rainbow have?", r"red.*violet"),
    _ask("facts", "Do you know what the opposite of hot is?", r"cold"),
    _ask("facts", "What colour does the grass have?", r"green"),
    _ask("facts", "Please count from 1 up to 10.", r"1, 2, 3, 4, 5, 6, 7, 8, 9, 10\b"),
    # Everything else is declined
    _ask("elsewhere", "Can you write some Python code that parses a CSV file?", DECLINES),
    _ask("elsewhere", "Who is going to win the next football championship?", DECLINES),
    _ask("elsewhere", "How is the weather over in Berlin right now?", DECLINES),
    _ask("elsewhere", "Please explain how photosynthesis works in plants.", DECLINES),
    _ask("elsewhere", "What's a good recipe for lentil soup?", DECLINES),
    _ask("elsewhere", "How many people are living in Germany?", DECLINES),
    _ask("elsewhere", "Which currency do they use in Sweden?", DECLINES),
    _ask("elsewhere", "Translate 'where is the station' into Italian.", DECLINES),
    _ask("elsewhere", "What do you think of the new tax law?", DECLINES),
    _ask("elsewhere", "Who was the author of Don Quixote?", DECLINES),
    _ask("elsewhere", "My washing machine makes a strange noise, what should I do?", DECLINES),
    _ask("elsewhere", "blorp fizz wug wug", DECLINES),
]  # fmt: skip
