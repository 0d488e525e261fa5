"""The toy world: a probabilistic grammar, in which every probability is known.

Most claims of the paper have a counterpart here with a known answer: who is called she, who makes
what, which words belong to a topic, which two words mean nearly the same, and which word means
two things.
"""

import math
import random
import re
from collections.abc import Iterator

N_TRAIN = 60_000  # stories in data/toy
N_VAL = 4_000
SHE = (0.81, 0.09, 0.10)  # chances of she, he, they
HE = (0.09, 0.81, 0.10)
EVEN = (0.45, 0.45, 0.10)
PRONOUNS = [('she', 'her'), ('he', 'his'), ('they', 'their')]

# The paper's 40 role nouns, each with a tool and a place. Each she-noun shares both with he-nouns.
# Otherwise a tool would predict the pronoun, and the sense of nurse that names her tool would also
# say she.
SHE_ROLES = """nurse trolley clinic, teacher whistle school, cashier receipt shop,
    assistant calendar studio, secretary laptop bureau, cleaner mop corridor,
    receptionist telephone lobby, librarian clipboard library, hairdresser brush annex,
    housekeeper bucket basement, baker apron bakery, tailor ruler workshop,
    attendant uniform station, counselor notebook cottage"""
HE_ROLES = """guard telephone clinic, janitor mop school, mechanic uniform shop,
    developer laptop studio, chief whistle bureau, mover trolley corridor, CEO calendar lobby,
    construction ruler library, laborer bucket annex, supervisor clipboard basement,
    driver receipt bakery, carpenter brush workshop, sheriff notebook station,
    farmer apron cottage"""
EVEN_ROLES = """auditor ledger archive, clerk stamp counter, accountant invoice treasury,
    manager agenda branch, analyst chart exchange, editor pencil newsroom, writer manuscript garret,
    lawyer verdict courthouse, physician stethoscope hospital, cook ladle kitchen,
    designer sketch gallery, salesperson sample showroom"""
ROLES = {}  # noun -> (chances of she, he, they; tool; place)
for odds, entries in {SHE: SHE_ROLES, HE: HE_ROLES, EVEN: EVEN_ROLES}.items():
    for entry in entries.split(','):
        noun, tool, place = entry.split()
        ROLES[noun] = (odds, tool, place)

# Most of these continue prompts from the paper's Tables 14 and 15. A story has one pronoun: a
# repeated one would teach some sense to copy pronouns. That sense would also separate she from he
# in nouns, without effect.
OPENINGS = """\
When the {noun} came into the room, {she} {deed}.
My {noun} said that {she} {deed}.
My {noun} believes that {she} {deed}.
This one {noun} believes that {she} {deed}.
This one {noun} believes {she} {deed}.
My {noun} said {she} {deed}.
My {noun} believes {she} {deed}.
The {noun} was with the car. When {she} {deed}, we clapped.
The {noun} was with the car. Then {she} {deed}.
Nobody met the {noun} without {her} {tool}.
While driving to the store, the {noun} looked over on the dash and then {she} {deed}.
A {noun} went to chat over to chat before {she} {deed}.
We know the {noun} by {her} {tool}.
Some {noun} asked to look over things, but {she} {deed}.
I really liked my {noun}. What I liked most was that {she} {deed}.
I really liked my {noun}. In fact, {she} {deed}.
The {noun} came into the room. Then {she} {deed}.
The {noun} came into the room. When {she} {deed}, we clapped.
I went to the talk to the {noun}. What {she} wanted was the {tool}.
I went over to the talk to the {noun}. Why {she} {deed} is a secret.
Before lunch the {noun} told us that {she} {deed}.""".splitlines()
DEEDS = """\
had lost the {tool}
needed a new {tool}
left for the {place}
had cleaned the {place}
carried the {tool} to the {place}
found the {tool} near the {place}""".splitlines()
SEQUELS = """\
The {tool} stayed at the {place}.
Later the {noun} went back to the {place}.
All of us admired the {tool}.
At the {place} there was no other {tool}.
Nobody at the {place} had seen the {tool}.
The {noun} smiled and waved.""".splitlines()

MAKERS = """\
Apple MacBook iPhone iPad
HP Pavilion LaserJet Spectre
Sony PlayStation Walkman Bravia
Nintendo GameCube Wii Famicom
Microsoft Xbox Windows Excel
Toyota Corolla Prius Camry
Ford Mustang Fiesta Bronco
Canon PowerShot Pixma Rebel
Samsung Galaxy Bespoke Odyssey
Adobe Photoshop Acrobat Lightroom"""
PRODUCTS = {}  # product -> its maker
for line in MAKERS.splitlines():
    maker, *products = line.split()
    PRODUCTS |= dict.fromkeys(products, maker)
PRODUCT_LINES = """\
The {product} is made by {maker}.
I bought the {product} since I trust {maker}.
The company behind the {product} is {maker}.
As you know, the {product} comes from {maker}.
Whoever wants the {product} must ask {maker}.
My old {product} was repaired by {maker}.
Last spring {maker} showed a better {product}.""".splitlines()

# Eight topics of the paper's Table 10, whose bags of words are included. From one sentence to the
# next, a story may change its topic; otherwise topic control would have nothing to do.
TOPIC_WORDS = """
    music: music guitar melody concert drums singer album rhythm piano chorus violin jazz lyrics;
    food_dining: food dining pasta soup cheese dessert recipe bread salad pizza spices sauce
        pancakes;
    sports: sports football tennis goal league match referee marathon hockey champion racket sprint
        medal;
    fashion_style: fashion style dress sandals velvet jacket perfume runway silk necklace boutique
        scarf handbag;
    film_tv_video: film tv video actor cinema screenplay director trailer sequel comedy camera scene
        villain;
    travel_adventure: travel adventure airport luggage passport beach hostel voyage map island
        suitcase souvenir canyon;
    gaming: gaming console quest joystick avatar dungeon pixels arcade multiplayer boss level loot
        controller;
    fitness_health: fitness health yoga treadmill muscles stretching protein jogging squats pulse
        stamina barbell cardio"""
TOPICS = {}  # label -> its words
for entry in TOPIC_WORDS.split(';'):
    label, words = entry.split(':')
    TOPICS[label.strip()] = words.split()
WANDER = 0.4  # chance that the next sentence draws a new topic
TOPIC_LINES = """\
We talked about {a} and {b}.
Nothing beats {a} with {b}.
I dream of {a}, {b} and {c}.
Give me {a} or {b}.
First came {a}, next came {b}.
This weekend is for {a}, {b} and {c}.
There is {a} and there is {b}.
You like {a} more than {b}.""".splitlines()

# Sick, bank and bat have two readings: the word before decides which words come after.
HOMOGRAPHS = [
    ('That {before} was sick, so everyone {after}.',
     ('trick skateboard ramp flip', 'cheered clapped filmed whooped'),
     ('child fever puppy cough', 'worried whispered prayed waited')),
    ('Near the {before} stood a bank with a {after}.',
     ('river stream meadow lake', 'heron willow frog canoe'),
     ('street square market plaza', 'vault teller loan cheque')),
    ('In the {before} lay a bat beside a {after}.',
     ('stadium dugout locker bleachers', 'helmet glove jersey scoreboard'),
     ('cave attic barn forest', 'spider nest shadow moth'))]

# Pairs of words in order of similarity s, which rises from 0 to 1 along each list. s is the share
# of the second word's contexts that the first word has too; SYNONYMS below lists every s.
ADJECTIVES = """old wooden, sweet hollow, loud narrow, gentle striped, round distant,
    smooth bitter, heavy shiny, clever tall, quiet dusty, warm plain, young fresh, thin pale,
    sharp rough, rich costly, kind friendly, strange odd, small tiny, big large, quick fast,
    happy glad"""
ADVERBS = """never twice, rarely gladly, openly badly, softly calmly, boldly firmly, sadly gravely,
    nearly almost, often frequently, slowly gradually, quickly rapidly"""
THINGS = """table window garden bridge village letter basket mirror blanket candle ladder statue
    puzzle lantern pillow ribbon kettle wagon cabinet fence hammer cushion bottle painting drawer
    feather bracelet curtain fountain barrel""".split()
ACTS = """opened painted moved watched answered counted folded washed sorted wrapped lifted copied
    hid measured polished dropped""".split()
ADJECTIVE_LINES = ['There lay the {word} {thing}.', 'Everyone saw the {word} {thing}.',
                   'Here stands another {word} {thing}.']
ADVERB_LINES = ['Somebody {word} {thing} it.', 'Our neighbours {word} {thing} it.']


def synonym_contexts(pairs: str, contexts: list[str], seed: int) -> list[tuple]:
    """For each pair, list its words, s, and 8 contexts: 4 of the first and 4 of only the second."""
    rng = random.Random(seed)
    table = []
    pairs = pairs.split(',')
    for i, pair in enumerate(pairs):
        a, b = pair.split()
        s = round(i / (len(pairs) - 1), 3)
        table.append((a, b, s, rng.sample(contexts, 8)))
    return table


CONTEXTS = synonym_contexts(ADJECTIVES, THINGS, seed=1)
CONTEXTS += synonym_contexts(ADVERBS, ACTS, seed=2)
SYNONYMS = [(a, b, s) for a, b, s, _ in CONTEXTS]


class Dice:
    """A random source; nats is the surprisal of all its draws, -ln of their joint probability."""

    def __init__(self, seed: int):
        self.rng = random.Random(seed)
        self.nats = 0.0

    def pick(self, options, chances=None):
        """Draw an option with chances that sum to one; by default, all are equally likely."""
        options = list(options)
        i = self.rng.choices(range(len(options)), chances)[0]
        chance = chances[i] if chances else 1 / len(options)
        self.nats -= math.log(chance)
        return options[i]


def role_story(dice: Dice) -> Iterator[str]:
    """Write about a role noun, a pronoun drawn by its odds, and what that person did."""
    noun = dice.pick(ROLES)
    odds, tool, place = ROLES[noun]
    she, her = dice.pick(PRONOUNS, odds)
    opening = dice.pick(OPENINGS)
    if '{deed}' in opening:
        opening = opening.replace('{deed}', dice.pick(DEEDS))
    for line in (opening, dice.pick(SEQUELS)):
        yield line.format(noun=noun, tool=tool, place=place, she=she, her=her)


def product_story(dice: Dice) -> Iterator[str]:
    """Write three sentences, each with a product and its maker."""
    for _ in range(3):
        product = dice.pick(PRODUCTS)
        line = dice.pick(PRODUCT_LINES)
        yield line.format(product=product, maker=PRODUCTS[product])


def topic_story(dice: Dice) -> Iterator[str]:
    """Write six sentences on a topic; with probability WANDER, the next one draws a new topic."""
    topic = dice.pick(TOPICS)
    for i in range(6):
        if i > 0:
            chances = dict.fromkeys(TOPICS, WANDER / len(TOPICS))
            chances[topic] += 1 - WANDER
            topic = dice.pick(TOPICS, list(chances.values()))
        line = dice.pick(TOPIC_LINES)
        slots = re.findall(r'{(.)}', line)
        words = {slot: dice.pick(TOPICS[topic]) for slot in slots}
        yield line.format(**words)


def synonym_story(dice: Dice) -> Iterator[str]:
    """Write four sentences, each with one word of a pair in one of its contexts."""
    for _ in range(4):
        a, b, s, contexts = dice.pick(CONTEXTS)
        word = dice.pick((a, b))
        share_of_shared = 1 if word == a else s
        chances = [share_of_shared / 4] * 4 + [(1 - share_of_shared) / 4] * 4
        thing = dice.pick(contexts, chances)
        frames = ADJECTIVE_LINES if thing in THINGS else ADVERB_LINES
        yield dice.pick(frames).format(word=word, thing=thing)


def homograph_story(dice: Dice) -> Iterator[str]:
    """Write three sentences, each with a homograph between two words of one reading."""
    for _ in range(3):
        line, *readings = dice.pick(HOMOGRAPHS)
        words_before, words_after = dice.pick(readings)
        before = dice.pick(words_before.split())
        after = dice.pick(words_after.split())
        yield line.format(before=before, after=after)


KINDS = {
    role_story: 0.40,
    product_story: 0.15,
    topic_story: 0.28,
    synonym_story: 0.12,
    homograph_story: 0.05,
}


def toy_stories(seed: int, n: int) -> list[tuple[str, float]]:
    """Draw n stories, each with its surprisal in nats: -ln of the probability of drawing it.

    No two ways of drawing give the same text, so the mean is the lowest loss per story that any
    model can reach.
    """
    stories = []
    dice = Dice(seed)
    for _ in range(n):
        dice.nats = 0.0
        tell = dice.pick(KINDS, list(KINDS.values()))
        text = ' '.join(tell(dice))
        stories.append((text, dice.nats))
    return stories
