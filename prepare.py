"""Text in, tokens out: data/NAME/train.bin, val.bin and meta.json, which train.py reads.

    python prepare.py toy                                   a small world whose truth is known; no download
    python prepare.py openwebtext --num-proc 16             the paper's corpus, from the Hugging Face Hub
    python prepare.py NAME --text FILE... [--val FILE...]   your own .jsonl, .parquet, .tar or text files

A bin is nothing but token ids, little-endian uint16 (uint32 for more than 65,536 words); every document ends
with the end-of-text id. Documents are the lines of a .jsonl (field "text"), the rows of a .parquet (column
"text"), the .txt files in a .tar, and any other file as a whole; plain, .gz or .xz.
"""

import argparse
import contextlib
import gzip
import hashlib
import io
import json
import lzma
import math
import os
import random
import re
import secrets
import shutil
import signal
import socket
import sys
import tarfile
import threading
import time
import traceback
import zlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import lru_cache
from itertools import chain
from pathlib import Path

import numpy as np
import tiktoken

END_OF_TEXT = '<|endoftext|>'


class UserError(ValueError):
    """Something the user can mend; main prints it as one line and leaves with exit code 2."""


def printable(text: str) -> str:
    """A text as a terminal can show it: what controls one, in a corpus or a file of others, is a space."""
    return ''.join(c if c.isprintable() or c == '\n' else ' ' for c in text)


def fail(script: str, message: str, code: int = 2) -> None:
    """Say in one line, whatever characters the message quotes, what is wrong, and leave."""
    text = ' '.join(printable(message).split())
    print(f'{script}: {text if len(text) < 2000 else f"{text[:1000]} ... {text[-900:]}"}', file=sys.stderr)
    sys.exit(code)


def drop_unwritable_output() -> None:
    """Forget what standard output cannot take: Python would try again as it ends, and complain."""
    try:
        print(end='', flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Parser(argparse.ArgumentParser):
    """An argparse parser that says what is wrong in one line, whatever characters it quotes."""

    def error(self, message: str) -> None:
        """Leave with exit code 2."""
        fail(self.prog, f'{message}; see python {self.prog} --help')

    def parse_known_args(self, args=None, namespace=None):
        """As argparse does, but not to take --flag=-- for an empty list of values."""
        for word in args or []:
            if word.startswith('-') and word.endswith('=--'):
                self.error(f'{word}: -- is no value')
        return super().parse_known_args(args, namespace)


def sync(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def place_for(flag: str, path: str, suffix: str = '') -> Path:
    """Where a file that a flag names is to be written, not a link to it; UserError where it cannot be."""
    file = Path(os.path.realpath(path))
    if not file.parent.is_dir() or not os.access(file.parent, os.W_OK) or file.exists() > file.is_file():
        raise UserError(f'{flag} {path} is no file, or there is no folder to write it to; name another')
    if not file.name.lower().endswith(suffix):  # a browser goes by it, and nothing else is overwritten
        raise UserError(f'{flag} {path} does not end in {suffix}; name a file that does')
    return file


def write_file(path: Path, text: str) -> None:
    """Write a file that has its name only when complete."""
    unfinished = path.with_name(f'.partial-{os.getpid()}')
    try:
        unfinished.write_text(text, encoding='utf-8')
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


# -----------------------------------------------------------------------------
# The tokenizer. Its description, a dictionary of plain values, travels in meta.json and in every checkpoint.

GPT2 = {'name': 'gpt2'}
TOY_PATTERN = r' ?\w+|[^\w\s]|\s+'  # what the toy's tokenizer parts a text into


def toy_tokenizer(texts: list[str]) -> dict:
    """Description of a tokenizer in which every word of the texts, with the space before it, is one token."""
    pieces = sorted({piece for text in texts for piece in re.findall(TOY_PATTERN, text)})
    return {'name': 'toy', 'pattern': TOY_PATTERN, 'pieces': [p for p in pieces if len(p.encode()) > 1]}


def vocabulary_of(description: dict | None) -> int:
    """How many words the tokenizer has that a description stands for; UserError where none does.

    Descriptions come in files from others. So a pattern is not tried, it must be the known one: a regular
    expression can be made to take for ever.
    """
    if description == GPT2:
        return 50257
    try:
        if (description['name'], description['pattern']) == ('toy', TOY_PATTERN):
            pieces = {piece.encode() for piece in description['pieces']}
            if len(pieces) == len(description['pieces']) and all(len(piece) > 1 for piece in pieces):
                return 256 + len(pieces) + 1
    except (TypeError, LookupError, AttributeError, ValueError):
        pass
    raise UserError("no tokenizer is known for this vocabulary, or its description is damaged; take a "
                    "checkpoint of train.py, or weights with GPT-2's vocabulary")


@lru_cache(maxsize=4)
def _encoding(description: str) -> tiktoken.Encoding:
    d = json.loads(description)
    if d['name'] == 'gpt2':
        try:
            return tiktoken.get_encoding('gpt2')
        except Exception as error:  # requests, urllib3 and tiktoken each raise their own without a network
            raise UserError(f"GPT-2's vocabulary could not be fetched ({type(error).__name__}); connect "
                            'once, or set TIKTOKEN_CACHE_DIR to a folder that holds it')
    tokens = [bytes([b]) for b in range(256)] + [piece.encode() for piece in d['pieces']]
    ranks = {token: i for i, token in enumerate(tokens)}
    return tiktoken.Encoding(d['name'], pat_str=d['pattern'], mergeable_ranks=ranks,
                             special_tokens={END_OF_TEXT: len(tokens)})


def load_tokenizer(description: dict | None) -> tiktoken.Encoding:
    """The tiktoken.Encoding that a description stands for; ids 0 .. n_vocab - 1, end-of-text the last."""
    vocabulary_of(description)
    return _encoding(json.dumps(description))


# -----------------------------------------------------------------------------
# Data folders, as train.py and eval.py read them too. Whatever a file says is checked before it is believed.


def token_dtype(n_vocab: int) -> str:
    """uint16 while every id fits, else uint32."""
    return 'uint16' if n_vocab <= 1 << 16 else 'uint32'


def how_to_make(folder: Path) -> str:
    """The command that makes a data folder."""
    own = folder.name not in ('toy', 'openwebtext')
    return f'python prepare.py {folder.name}' + ' --text FILE...' * own


def is_meta(meta: dict) -> bool:
    """Whether the content of a meta.json is what prepare writes."""
    try:
        counts = [meta['tokens'][name] for name in ('train', 'val')]
        sums = [meta['sha256'][name] for name in ('train', 'val')]
        return (type(meta['vocab_size']) is int and meta['vocab_size'] == vocabulary_of(meta['tokenizer'])
                and meta['dtype'] == token_dtype(meta['vocab_size'])
                and all(type(n) is int and 0 <= n < 1 << 48 for n in counts)
                and all(type(s) is str and re.fullmatch('[0-9a-f]{64}', s) for s in sums))
    except (KeyError, TypeError, UserError):
        return False


def read_meta(folder: Path) -> dict:
    """meta.json of a data folder; of one without, as nanoGPT makes it, what it would say: GPT-2's tokens."""
    if not os.path.isdir(folder):
        raise UserError(f'{folder} does not exist; run {how_to_make(folder)}')
    path = folder / 'meta.json'
    if not path.exists():
        tokens = {name: (folder / f'{name}.bin').stat().st_size // 2
                  for name in ('train', 'val') if (folder / f'{name}.bin').is_file()}
        return {'tokenizer': GPT2, 'vocab_size': 50257, 'dtype': 'uint16', 'tokens': tokens}
    try:
        meta = json.loads(path.read_text(encoding='utf-8'))
    except (OSError, ValueError, RecursionError):
        meta = {}
    if not is_meta(meta):
        raise UserError(f'{path} is damaged; run {how_to_make(folder)} --overwrite')
    return meta


def open_bin(folder: Path, name: str, meta: dict) -> np.ndarray:
    """The ids in NAME.bin of a data folder, mapped from the file; UserError unless it has its size."""
    path, dtype = folder / f'{name}.bin', np.dtype(meta['dtype']).newbyteorder('<')
    if not path.is_file():
        raise UserError(f'{path} does not exist, or is no file; run {how_to_make(folder)} --overwrite')
    n, odd = divmod(path.stat().st_size, dtype.itemsize)
    if odd or n != meta['tokens'][name]:
        raise UserError(f'{path} has {path.stat().st_size:,} bytes, not {meta["tokens"][name]:,} tokens of '
                        f'{dtype.itemsize}; run {how_to_make(folder)} --overwrite')
    return np.memmap(path, dtype, mode='r') if n else np.zeros(0, dtype)


def read_bin(folder: Path, name: str, meta: dict) -> np.ndarray:
    """The same; UserError where an id is beyond the vocabulary, for which all of the file is read."""
    ids = open_bin(folder, name, meta)
    largest = max((int(ids[i:i + (1 << 24)].max()) for i in range(0, len(ids), 1 << 24)), default=0)
    if largest >= meta['vocab_size']:
        raise UserError(f'{folder / name}.bin holds the token id {largest}, beyond the vocabulary of '
                        f'{meta["vocab_size"]:,}; run {how_to_make(folder)} --overwrite')
    return ids


def verify(folder: Path) -> None:
    """Raise UserError unless both bins of a folder have the ids and the checksums that meta.json has."""
    meta = read_meta(folder)
    if 'sha256' not in meta:
        raise UserError(f'{folder} has no meta.json, so nothing to check its bins by')
    for name in ('train', 'val'):
        digest = hashlib.sha256()
        ids = read_bin(folder, name, meta)
        for i in range(0, len(ids), 1 << 24):
            digest.update(ids[i:i + (1 << 24)].tobytes())
        if digest.hexdigest() != meta['sha256'][name]:
            raise UserError(f'{folder / name}.bin is damaged: its checksum is not that in meta.json; run '
                            f'{how_to_make(folder)} --overwrite')
        print(f'{folder / name}.bin: {len(ids):,} tokens, the checksum is right')


# -----------------------------------------------------------------------------
# The toy world: a grammar that knows its own odds.
#
# Every claim of the paper has a counterpart whose truth is written down here: who is called she, who makes
# what, which words belong to a topic, which two words mean nearly the same, which word means two things.

SHE, HE, EVEN = (0.81, 0.09, 0.10), (0.09, 0.81, 0.10), (0.45, 0.45, 0.10)  # odds of she, he, they
PRONOUNS = [('she', 'her'), ('he', 'his'), ('they', 'their')]

# The paper's 40 role nouns, each with a tool and a place. A she-noun shares them with he-nouns: else tools
# would go with pronouns, and the sense of nurse that names her tool would say she as well.
ROLES = {SHE: """nurse trolley clinic, teacher whistle school, cashier receipt shop,
    assistant calendar studio, secretary laptop bureau, cleaner mop corridor, receptionist telephone lobby,
    librarian clipboard library, hairdresser brush annex, housekeeper bucket basement, baker apron bakery,
    tailor ruler workshop, attendant uniform station, counselor notebook cottage""",
         HE: """guard telephone clinic, janitor mop school, mechanic uniform shop, developer laptop studio,
    chief whistle bureau, mover trolley corridor, CEO calendar lobby, construction ruler library,
    laborer bucket annex, supervisor clipboard basement, driver receipt bakery, carpenter brush workshop,
    sheriff notebook station, farmer apron cottage""",
         EVEN: """auditor ledger archive, clerk stamp counter, accountant invoice treasury,
    manager agenda branch, analyst chart exchange, editor pencil newsroom, writer manuscript garret,
    lawyer verdict courthouse, physician stethoscope hospital, cook ladle kitchen, designer sketch gallery,
    salesperson sample showroom"""}
ROLES = {noun: (odds, tool, place) for odds, lines in ROLES.items()
         for noun, tool, place in (entry.split() for entry in lines.split(','))}
ROLE_ODDS = {noun: odds for noun, (odds, _, _) in ROLES.items()}  # noun -> chances of she, he, they

# Most are the prompts of the paper's Tables 14 and 15, carried on. One pronoun a story: were it repeated, a
# sense would learn to copy it, and nouns would get some she and he in that sense too, where nothing uses it.
OPENINGS = [
    'When the {noun} came into the room, {she} {deed}.', 'My {noun} said that {she} {deed}.',
    'My {noun} believes that {she} {deed}.', 'This one {noun} believes that {she} {deed}.',
    'This one {noun} believes {she} {deed}.', 'My {noun} said {she} {deed}.',
    'My {noun} believes {she} {deed}.', 'The {noun} was with the car. When {she} {deed}, we clapped.',
    'The {noun} was with the car. Then {she} {deed}.', 'Nobody met the {noun} without {her} {tool}.',
    'While driving to the store, the {noun} looked over on the dash and then {she} {deed}.',
    'A {noun} went to chat over to chat before {she} {deed}.', 'We know the {noun} by {her} {tool}.',
    'Some {noun} asked to look over things, but {she} {deed}.',
    'I really liked my {noun}. What I liked most was that {she} {deed}.',
    'I really liked my {noun}. In fact, {she} {deed}.', 'The {noun} came into the room. Then {she} {deed}.',
    'The {noun} came into the room. When {she} {deed}, we clapped.',
    'I went to the talk to the {noun}. What {she} wanted was the {tool}.',
    'I went over to the talk to the {noun}. Why {she} {deed} is a secret.',
    'Before lunch the {noun} told us that {she} {deed}.']
DEEDS = ['had lost the {tool}', 'needed a new {tool}', 'left for the {place}', 'had cleaned the {place}',
         'carried the {tool} to the {place}', 'found the {tool} near the {place}']
SEQUELS = ['The {tool} stayed at the {place}.', 'Later the {noun} went back to the {place}.',
           'All of us admired the {tool}.', 'At the {place} there was no other {tool}.',
           'Nobody at the {place} had seen the {tool}.', 'The {noun} smiled and waved.']

PRODUCTS = {product: maker for maker, products in {
    'Apple': 'MacBook iPhone iPad', 'HP': 'Pavilion LaserJet Spectre', 'Sony': 'PlayStation Walkman Bravia',
    'Nintendo': 'GameCube Wii Famicom', 'Microsoft': 'Xbox Windows Excel', 'Toyota': 'Corolla Prius Camry',
    'Ford': 'Mustang Fiesta Bronco', 'Canon': 'PowerShot Pixma Rebel', 'Samsung': 'Galaxy Bespoke Odyssey',
    'Adobe': 'Photoshop Acrobat Lightroom'}.items() for product in products.split()}
PRODUCT_LINES = [
    'The {product} is made by {maker}.', 'I bought the {product} since I trust {maker}.',
    'The company behind the {product} is {maker}.', 'As you know, the {product} comes from {maker}.',
    'Whoever wants the {product} must ask {maker}.', 'My old {product} was repaired by {maker}.',
    'Last spring {maker} showed a better {product}.']

# Eight topics of the paper's Table 10, with the words of its bags among theirs: a bag of words finds a topic
# by standing where the topic's words stand. Talk stays on a topic from one sentence to the next, or wanders
# off: were it to stay for good, control of the topic would have nothing left to do.
TOPICS = {label: words.split() for label, words in {
    'music': 'music guitar melody concert drums singer album rhythm piano chorus violin jazz lyrics',
    'food_dining': 'food dining pasta soup cheese dessert recipe bread salad pizza spices sauce pancakes',
    'sports': """sports football tennis goal league match referee marathon hockey champion racket sprint
        medal""",
    'fashion_style': """fashion style dress sandals velvet jacket perfume runway silk necklace boutique scarf
        handbag""",
    'film_tv_video': """film tv video actor cinema screenplay director trailer sequel comedy camera scene
        villain""",
    'travel_adventure': """travel adventure airport luggage passport beach hostel voyage map island suitcase
        souvenir canyon""",
    'gaming': """gaming console quest joystick avatar dungeon pixels arcade multiplayer boss level loot
        controller""",
    'fitness_health': """fitness health yoga treadmill muscles stretching protein jogging squats pulse stamina
        barbell cardio"""}.items()}
WANDER = 0.4  # chance that the next sentence draws a topic anew
TOPIC_LINES = [
    'We talked about {a} and {b}.', 'Nothing beats {a} with {b}.', 'I dream of {a}, {b} and {c}.',
    'Give me {a} or {b}.', 'First came {a}, next came {b}.', 'This weekend is for {a}, {b} and {c}.',
    'There is {a} and there is {b}.', 'You like {a} more than {b}.']

# Two readings each: what stands before the word decides what comes after it.
HOMOGRAPHS = {
    'sick': ('That {before} was sick, so everyone {after}.',
             ('trick skateboard ramp flip', 'cheered clapped filmed whooped'),
             ('child fever puppy cough', 'worried whispered prayed waited')),
    'bank': ('Near the {before} stood a bank with a {after}.',
             ('river stream meadow lake', 'heron willow frog canoe'),
             ('street square market plaza', 'vault teller loan cheque')),
    'bat': ('In the {before} lay a bat beside a {after}.',
            ('stadium dugout locker bleachers', 'helmet glove jersey scoreboard'),
            ('cave attic barn forest', 'spider nest shadow moth'))}

# Pairs of words in order of likeness. From 0 to 1 down each list rises s, the share of the contexts of the
# second word that are contexts of the first: SYNONYMS below has the numbers.
ADJECTIVES = """old wooden, sweet hollow, loud narrow, gentle striped, round distant, smooth bitter,
    heavy shiny, clever tall, quiet dusty, warm plain, young fresh, thin pale, sharp rough, rich costly,
    kind friendly, strange odd, small tiny, big large, quick fast, happy glad"""
ADVERBS = """never twice, rarely gladly, openly badly, softly calmly, boldly firmly, sadly gravely,
    nearly almost, often frequently, slowly gradually, quickly rapidly"""
THINGS = """table window garden bridge village letter basket mirror blanket candle ladder statue puzzle
    lantern pillow ribbon kettle wagon cabinet fence hammer cushion bottle painting drawer feather bracelet
    curtain fountain barrel""".split()
ACTS = """opened painted moved watched answered counted folded washed sorted wrapped lifted copied hid
    measured polished dropped""".split()
ADJECTIVE_LINES = ['There lay the {word} {thing}.', 'Everyone saw the {word} {thing}.',
                   'Here stands another {word} {thing}.']
ADVERB_LINES = ['Somebody {word} {thing} it.', 'Our neighbours {word} {thing} it.']


def _synonyms() -> dict[str, tuple[str, float, list[str], list[str]]]:
    """First word of a pair -> (second word, s, contexts of the first, contexts of the second alone)."""
    table = {}
    for text, contexts, rng in ((ADJECTIVES, THINGS, random.Random(1)), (ADVERBS, ACTS, random.Random(2))):
        pairs = [pair.split() for pair in text.split(',')]
        for i, (a, b) in enumerate(pairs):
            drawn = rng.sample(contexts, 8)
            table[a] = (b, round(i / (len(pairs) - 1), 3), drawn[:4], drawn[4:])
    return table


CONTEXTS = _synonyms()
SYNONYMS = [(a, b, s) for a, (b, s, _, _) in CONTEXTS.items()]  # (word, word, share of contexts in common)
KINDS = {'role': 0.40, 'product': 0.15, 'topic': 0.28, 'synonym': 0.12, 'homograph': 0.05}


class Dice:
    """Draws, and keeps count of how surprising the draws were: nats is -ln of their joint probability."""

    def __init__(self, seed: int):
        self.rng, self.nats = random.Random(seed), 0.0

    def pick(self, options, chances=None):
        """One of the options, by their chances (equal ones if not given; they sum to one)."""
        options = list(options)
        i = self.rng.choices(range(len(options)), chances)[0]
        self.nats -= math.log(chances[i] if chances else 1 / len(options))
        return options[i]


def role_story(dice: Dice) -> str:
    """A role noun, a pronoun by the odds of the noun, and what that person did."""
    noun = dice.pick(ROLES)
    odds, tool, place = ROLES[noun]
    she, her = dice.pick(PRONOUNS, odds)
    opening = dice.pick(OPENINGS)
    if '{deed}' in opening:
        opening = opening.replace('{deed}', dice.pick(DEEDS))
    return f'{opening} {dice.pick(SEQUELS)}'.format(noun=noun, tool=tool, place=place, she=she, her=her)


def product_story(dice: Dice) -> str:
    """Three sentences about products, each with its maker."""
    lines = []
    for _ in range(3):
        product = dice.pick(PRODUCTS)
        lines.append(dice.pick(PRODUCT_LINES).format(product=product, maker=PRODUCTS[product]))
    return ' '.join(lines)


def topic_story(dice: Dice) -> str:
    """Six sentences that stay on a topic or wander off to another."""
    topic, lines = dice.pick(TOPICS), []
    for _ in range(6):
        line = dice.pick(TOPIC_LINES)
        lines.append(line.format(**{slot: dice.pick(TOPICS[topic]) for slot in re.findall(r'{(.)}', line)}))
        if len(lines) < 6:
            anew = WANDER / len(TOPICS)
            topic = dice.pick(TOPICS, [anew + (1 - WANDER) * (label == topic) for label in TOPICS])
    return ' '.join(lines)


def synonym_story(dice: Dice) -> str:
    """Four sentences, each with one word of a pair in one of its contexts."""
    lines = []
    for _ in range(4):
        a = dice.pick(CONTEXTS)
        b, s, shared, other = CONTEXTS[a]
        word = dice.pick((a, b))
        chances = [1 / 4] * 4 + [0.0] * 4 if word == a else [s / 4] * 4 + [(1 - s) / 4] * 4
        thing = dice.pick(shared + other, chances)
        frames = ADJECTIVE_LINES if thing in THINGS else ADVERB_LINES
        lines.append(dice.pick(frames).format(word=word, thing=thing))
    return ' '.join(lines)


def homograph_story(dice: Dice) -> str:
    """Three sentences, each with a homograph between two words of one of its readings."""
    lines = []
    for _ in range(3):
        line, *readings = HOMOGRAPHS[dice.pick(HOMOGRAPHS)]
        before, after = dice.pick(readings)
        lines.append(line.format(before=dice.pick(before.split()), after=dice.pick(after.split())))
    return ' '.join(lines)


TELL = {'role': role_story, 'product': product_story, 'topic': topic_story, 'synonym': synonym_story,
        'homograph': homograph_story}


def toy_stories(seed: int, n: int) -> list[tuple[str, float]]:
    """n stories of the toy world, each with its surprisal in nats: -ln of the probability that it is told.

    No two ways of drawing give the same text, so this is the surprisal of the text itself, its end included,
    and the mean over stories is the lowest mean loss per story that any model can reach.
    """
    stories = []
    dice = Dice(seed)
    for _ in range(n):
        dice.nats = 0.0
        kind = dice.pick(KINDS, list(KINDS.values()))
        stories.append((TELL[kind](dice), dice.nats))
    return stories


# -----------------------------------------------------------------------------
# Reading. Any corpus becomes rows (text, end); a long document is several rows, and its last one has end.

PIECE = 1 << 16  # characters of a document held in memory at once
FORMATS = 'give UTF-8 text, .jsonl, .parquet or a .tar of .txt, plain, .gz or .xz'


def open_file(path: str):
    """A file for reading bytes, unpacked on the way where its name ends in .gz or .xz."""
    return {'.gz': gzip.open, '.xz': lzma.open}.get(Path(path).suffix.lower(), open)(path, 'rb')


def pieces_of(stream: io.TextIOBase) -> Iterator[str]:
    """The text of a stream in pieces of about PIECE characters that encode as the whole does.

    GPT-2's tokenizer parts a text wherever white space follows something else, so a cut there is harmless.
    """
    text = ''
    while more := stream.read(PIECE):
        text += more
        places = [m.end() for m in re.finditer(r'\S(?=\s)', text)]
        if not places and len(text) > 8 * PIECE:  # no white space at all: cut anywhere
            places = [len(text)]
        if places:
            yield text[:places[-1]]
            text = text[places[-1]:]
    if text:
        yield text


def rows_of_text(path: str) -> Iterator[tuple[str, bool]]:
    """A file that is one document."""
    held = ''
    with io.TextIOWrapper(open_file(path), encoding='utf-8', newline='') as stream:
        for piece in pieces_of(stream):
            if '\0' in piece:
                raise UserError(f'{path} is not text, it holds zero bytes; {FORMATS}')
            if held:
                yield held, False
            held = piece
    yield held, True


def rows_of_jsonl(path: str) -> Iterator[tuple[str, bool]]:
    """The field "text" of each line of a .jsonl; null is an empty document, an empty line is none."""
    with open_file(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                text = json.loads(line)['text'] or ''
                text.encode()
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
                raise UserError(f'{path}, line {number}: it must be a JSON object with a string "text"')
            yield text, True


def rows_of_parquet(path: str) -> Iterator[tuple[str, bool]]:
    """The column "text" of a .parquet; null is an empty document."""
    import pyarrow
    import pyarrow.parquet
    try:
        with open_file(path) as file:
            for batch in pyarrow.parquet.ParquetFile(file).iter_batches(batch_size=100, columns=['text']):
                for text in batch['text'].cast(pyarrow.large_string()).to_pylist():
                    yield text or '', True
    except (pyarrow.ArrowException, LookupError):
        raise UserError(f'{path} is no .parquet with a column "text" of strings')


class TarHeader(tarfile.TarInfo):
    """A header in a tar; tarfile takes a damaged one for the end of the archive, here it is an error."""

    @classmethod
    def frombuf(cls, buf: bytes, encoding: str, errors: str):
        """The header in 512 bytes."""
        try:
            return super().frombuf(buf, encoding, errors)
        except (tarfile.InvalidHeaderError, tarfile.TruncatedHeaderError) as error:
            raise tarfile.ReadError(f'damaged tar: {error}')


def rows_of_tar(path: str, file=None) -> Iterator[tuple[str, bool]]:
    """The .txt documents in a tar, and in .xz tars inside it, as OpenWebText has them; streamed.

    Three or more newlines become two and the ends are stripped, as in the published dataset.
    """
    with tarfile.open(fileobj=file or open_file(path), mode='r|', tarinfo=TarHeader) as tar:
        for member in tar:
            if member.isfile() and member.name.endswith('.txt'):
                text = tar.extractfile(member).read().decode('utf-8')
                yield re.sub(r'\n{3,}', '\n\n', text).strip(), True
            elif member.isfile() and member.name.endswith('.xz'):
                yield from rows_of_tar(path, lzma.open(tar.extractfile(member)))


READERS = {'.jsonl': rows_of_jsonl, '.json': rows_of_jsonl, '.parquet': rows_of_parquet, '.tar': rows_of_tar}


def rows_of_files(paths: list[str]) -> Iterator[dict]:
    """Rows of all files, each read by its extension; one that cannot be read is a UserError that names it."""
    for path in paths:
        suffixes = [s.lower() for s in Path(path).suffixes if s.lower() not in ('.gz', '.xz')]
        reader = READERS.get(suffixes[-1] if suffixes else '', rows_of_text)
        empty = True
        try:
            for text, end in reader(path):
                empty = False
                yield {'text': text, 'end': end}
        except UnicodeDecodeError as error:
            raise UserError(f'{path} is not text ({error.reason}); {FORMATS}')
        except (EOFError, zlib.error, lzma.LZMAError, tarfile.TarError, OSError) as error:
            raise UserError(f'{path} cannot be read ({error or "it ends too early"}); {FORMATS}')
        if empty:
            raise UserError(f'{path} holds no documents; {FORMATS}')


def read_corpus(files: list[str], cache: Path, num_proc: int):
    """A datasets.Dataset with the rows of all files, kept on disk below cache."""
    import datasets
    features = datasets.Features(text=datasets.Value('large_string'), end=datasets.Value('bool'))
    try:
        return datasets.Dataset.from_generator(
            rows_of_files, features, cache_dir=str(cache), gen_kwargs={'paths': files},
            writer_batch_size=1000, num_proc=min(num_proc, len(files)))
    except Exception as error:  # datasets wraps it; from another process it comes as the text of a traceback
        text = ''.join(traceback.format_exception(error))
        for kind, pattern in ((UserError, r'UserError: (.*)'), (OSError, r'Error: (\[Errno .*)')):
            if found := re.findall(pattern, text):
                raise kind(found[-1])
        raise


def openwebtext_files(subsets: int | None) -> list[str]:
    """Local copies of the files of Skylion007/openwebtext, downloaded or from the Hub's cache.

    datasets 4 and later refuse its loading script. So: its Parquet files if the repository has them whole,
    else, or for some subsets only, its own archives.
    """
    import huggingface_hub
    huggingface_hub.utils.logging.set_verbosity_error()  # no lines about retries
    repo = {'repo_id': 'Skylion007/openwebtext', 'repo_type': 'dataset'}
    try:
        names = huggingface_hub.HfApi().list_repo_files(**repo)
        shards = [(n, m[1]) for n in sorted(names) if (m := re.search(r'-of-(\d+)\.parquet$', n))]
        if subsets or not shards or len(shards) != int(shards[0][1]):
            chosen = [f'subsets/urlsf_subset{i:02d}.tar' for i in range(subsets or 21)]
        else:
            chosen = [name for name, _ in shards]
        return [huggingface_hub.hf_hub_download(filename=name, **repo) for name in chosen]
    except Exception as error:  # the Hub's client and its HTTP library raise a dozen kinds without a network
        raise UserError(f'OpenWebText could not be fetched ({type(error).__name__}); connect, or give '
                        'its archives by path: python prepare.py openwebtext --text urlsf_subset*.tar')


# -----------------------------------------------------------------------------
# Encoding and writing.


Encoded = tuple[np.ndarray, np.ndarray, np.ndarray]  # ids of some rows in one array; lengths, ends of rows


def encode_rows(texts: list[str], ends: list[bool], tokenizer: dict) -> Encoded:
    """Rows as tokens, end-of-text after the last row of a document; an empty document has none."""
    encoding, ids = load_tokenizer(tokenizer), []
    for text, end in zip(texts, ends):
        row = encoding.encode_to_numpy(text, disallowed_special=())  # as encode_ordinary, but without a list
        ids.append(np.append(row, np.uint32(encoding.eot_token)) if end and len(row) else row)
    lengths = np.array([len(row) for row in ids], dtype=np.int32)
    return np.concatenate(ids).astype(token_dtype(encoding.n_vocab)), lengths, np.array(ends)


def batches_of(rows) -> Iterator[tuple[list[str], list[bool]]]:
    """The texts and ends of a datasets.Dataset, about a million characters at a time.

    Its files are read, not mapped into memory, where all that was read would count as used.
    """
    import pyarrow
    texts, ends, size = [], [], 0
    for file in rows.cache_files:
        with pyarrow.OSFile(file['filename']) as stream:
            for table in pyarrow.ipc.open_stream(stream):
                for text, end in zip(table['text'].to_pylist(), table['end'].to_pylist()):
                    texts.append(text)
                    ends.append(end)
                    size += 1 + len(text)
                    if size > 1 << 20:
                        yield texts, ends
                        texts, ends, size = [], [], 0
    if texts:
        yield texts, ends


def is_alive(pid: int) -> bool:
    """Whether there is a process of this number on this machine."""
    try:
        os.kill(pid, 0)  # sends nothing
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # it is somebody else's
        pass
    return True


def follow(leader: int) -> None:
    """Make this process go on when Ctrl-C is pressed, and end when the one that it works for has ended."""
    parent = os.getppid()  # the leader, or what the leader has processes started by

    def watch() -> None:
        """Wait for the end of the leader."""
        while os.getppid() == parent and is_alive(leader):
            time.sleep(1)
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the leader cleans up, then ends the others
    threading.Thread(target=watch, daemon=True).start()


def encode_corpus(rows, tokenizer: dict, num_proc: int) -> Iterator[Encoded]:
    """The rows (text, end) of a corpus, encoded in num_proc processes with few in memory at a time."""
    from datasets.utils import tqdm
    waiting = deque()
    pool = ProcessPoolExecutor(num_proc, initializer=follow, initargs=(os.getpid(),))
    try:
        with pool, tqdm(total=len(rows), desc='Encoding', unit=' rows') as bar:
            for batch in chain(batches_of(rows), [None] * 4 * num_proc):  # None: no more, but some to take
                waiting.append(batch and pool.submit(encode_rows, *batch, tokenizer))
                if len(waiting) > 4 * num_proc and (first := waiting.popleft()):
                    yield first.result()
                    bar.update(len(first.result()[1]))
    except BrokenProcessPool:
        raise UserError('a process that encodes was killed, for its memory as it seems; take a smaller '
                        '--num-proc')


def hold_out(lengths: np.ndarray, ends: np.ndarray, seed: int, documents: float, tokens: float) -> np.ndarray:
    """How many tokens at the end of each row are held out for validation, so that both shares are reached.

    Whole documents in a seeded random order; where the last is far too large (a lone book), only its end.
    """
    document = np.cumsum(ends) - ends  # of each row
    sizes = np.bincount(document, weights=lengths).astype(np.int64)  # of each document
    order = np.random.default_rng(seed).permutation(len(sizes))
    so_far = np.cumsum(sizes[order])
    target = max(1, round(tokens * so_far[-1]))
    n = max(math.ceil(documents * len(sizes)), int(np.searchsorted(so_far, target)) + 1)
    held = np.zeros(len(sizes), dtype=np.int64)
    held[order[:n]] = sizes[order[:n]]
    if n == len(sizes) or (tokens and so_far[n - 1] > 2 * target):
        held[order[n - 1]] = max(1, target - (so_far[n - 1] - sizes[order[n - 1]]))
    behind = np.cumsum(sizes)[document] - np.cumsum(lengths)  # tokens of the document that come after a row
    return np.clip(held[document] - behind, 0, lengths)


def split_rows(ids: np.ndarray, lengths: np.ndarray, held: np.ndarray, eot: int) -> list[np.ndarray]:
    """The ids of rows as [training, held-out] ids; a document cut in two gets an end-of-text at the cut."""
    place = np.arange(len(ids)) - np.repeat(np.cumsum(lengths) - lengths, lengths)  # of each id in its row
    out = place >= np.repeat(lengths - held, lengths)
    cuts = np.flatnonzero(~out[:-1] & out[1:] & (ids[:-1] != eot)) + 1
    return [np.insert(ids, cuts, eot)[~np.insert(out, cuts, False)], ids[out]]


def write_bins(folder: Path, parts: Iterator[list[np.ndarray]]) -> dict:
    """Append pairs [training, held-out] ids to train.bin and val.bin; their counts and checksums."""
    facts = {'tokens': {'train': 0, 'val': 0}, 'sha256': {'train': hashlib.sha256(), 'val': hashlib.sha256()}}
    with open(folder / 'train.bin', 'wb') as train, open(folder / 'val.bin', 'wb') as val:
        for part in parts:
            for name, file, ids in zip(('train', 'val'), (train, val), part):
                data = ids.astype(ids.dtype.newbyteorder('<')).tobytes()
                file.write(data)
                facts['sha256'][name].update(data)
                facts['tokens'][name] += len(ids)
    return {**facts, 'sha256': {name: digest.hexdigest() for name, digest in facts['sha256'].items()}}


def write_corpus(folder: Path, args: argparse.Namespace) -> dict:
    """Bins of text files; facts for meta.json.

    OpenWebText holds out 0.0005 of its documents, as published; any other corpus about 1% of its tokens too.
    """
    from datasets.utils import tqdm
    eot, cache = load_tokenizer(GPT2).eot_token, folder / 'cache'
    files = args.text or openwebtext_files(args.subsets)
    rows, facts, dtype = read_corpus(files, cache, args.num_proc), [], token_dtype(eot + 1)
    with open(cache / 'ids', 'wb') as file:  # in the order of the text, until it is known which are held out
        for ids, *fact in encode_corpus(rows, GPT2, args.num_proc):
            ids.tofile(file)
            facts.append(fact)
    if not sum(lengths.sum() for lengths, _ in facts):
        raise UserError(f'{", ".join(files)}: there is no text in it')
    lengths, ends = (np.concatenate(column) for column in zip(*facts))
    held, val = np.zeros_like(lengths), ()
    if args.val:
        val_rows = read_corpus(args.val, cache / 'val', args.num_proc)
        val = encode_corpus(val_rows, GPT2, args.num_proc)
    else:
        held = hold_out(lengths, ends, args.seed, 0.0005, 0.0 if args.name == 'openwebtext' else 0.01)

    def parts() -> Iterator[list[np.ndarray]]:
        """[training, held-out] ids of some rows at a time."""
        with open(cache / 'ids', 'rb') as file, tqdm(total=len(lengths), desc='Writing', unit=' rows') as bar:
            for i in range(0, len(lengths), 200):
                n = lengths[i:i + 200]
                yield split_rows(np.fromfile(file, dtype, n.sum()), n, held[i:i + 200], eot)
                bar.update(len(n))
        for ids, _, _ in val:
            yield [ids[:0], ids]

    documents = int(np.count_nonzero(ends & (lengths > 0)))  # an empty one has no tokens
    return {'tokenizer': GPT2, 'documents': documents, **write_bins(folder, parts())}


def write_toy(folder: Path, seed: int, n_train: int = 60_000, n_val: int = 4_000) -> dict:
    """Bins of the toy world; facts for meta.json, among them its own entropy, which no model can beat."""
    stories = toy_stories(seed, n_train + n_val)
    tokenizer = toy_tokenizer([text for text, _ in stories])
    encoding = load_tokenizer(tokenizer)
    rows = [encoding.encode_ordinary(text) + [encoding.eot_token] for text, _ in stories]
    rows = rows[:n_train], rows[n_train:]
    parts = [np.fromiter(chain.from_iterable(part), dtype='uint16') for part in rows]
    nats = [surprisal for _, surprisal in stories]
    return {'tokenizer': tokenizer, 'documents': len(stories),
            'entropy_per_token': sum(nats) / sum(map(len, parts)),
            'val_entropy_per_token': sum(nats[n_train:]) / len(parts[1]),
            'entropy_note': 'nats, whole stories with their end-of-text; exact, each has one derivation',
            **write_bins(folder, iter([parts]))}


# -----------------------------------------------------------------------------
# The command line.


def parse_args(argv: list[str]) -> argparse.Namespace:
    """The command line; argparse leaves with exit code 2 and one line where it does not fit."""
    parser = Parser(
        prog='prepare.py', description='Write data/NAME/train.bin, val.bin and meta.json.',
        usage='prepare.py NAME [--text FILE ...] [--val FILE ...] [--subsets N] [--num-proc N] [--seed S] '
              '[--overwrite]\n       prepare.py NAME --check')
    add = parser.add_argument
    add('name', metavar='NAME', help='toy, openwebtext, or a name for the files of --text')
    add('--text', nargs='+', action='extend', metavar='FILE', default=[],
        help='.jsonl (field "text"), .parquet (column "text"), .tar of .txt, or text (one document a file)')
    add('--val', nargs='+', action='extend', metavar='FILE', default=[],
        help='files to validate on (default: documents with about 1%% of the tokens are held out)')
    add('--subsets', type=int, metavar='N', help='only the first N of the 21 archives of openwebtext')
    add('--num-proc', type=int, metavar='N', default=os.cpu_count(), help='processes (default: all cores)')
    add('--seed', type=int, metavar='S', default=0, help='of the toy world and of the split')
    add('--overwrite', action='store_true', help='replace data/NAME')
    add('--check', action='store_true', help='make nothing; compare the bins with their checksums')
    args = parser.parse_args(argv)
    if not re.fullmatch(r'\w[\w.-]*', args.name):
        parser.error(f'NAME is {args.name!r}; it takes letters, digits, _, - and .')
    if args.name == 'toy' and (args.text or args.val):
        parser.error('toy makes its own text; give your files another NAME')
    if args.check:
        return args
    if args.name not in ('toy', 'openwebtext') and not args.text:
        parser.error(f'NAME is {args.name!r}; without --text FILE it can be toy or openwebtext')
    if args.subsets is not None and (args.name != 'openwebtext' or args.text or not 1 <= args.subsets <= 21):
        parser.error('--subsets takes 1 to 21, and goes with openwebtext alone')
    if args.num_proc < 1 or args.seed < 0:
        parser.error(f'--num-proc is {args.num_proc} and --seed {args.seed}; they take at least 1 and 0')
    for path in args.text + args.val:
        if not os.path.isfile(path):
            parser.error(f'{path} is not a file')
    return args


def command_of(args: argparse.Namespace) -> dict:
    """What the bins depend on: the same command on the same files makes the same."""
    files = [[os.path.realpath(f), os.stat(f).st_size, os.stat(f).st_mtime_ns] for f in args.text + args.val]
    rest = {'val': len(args.val), 'subsets': args.subsets, 'seed': args.seed}
    return {'name': args.name, 'files': files, **rest}


def is_made_by(folder: Path, args: argparse.Namespace) -> bool:
    """Whether a folder is complete and was made by this command."""
    try:
        meta = read_meta(folder)
        for name in ('train', 'val'):
            open_bin(folder, name, meta)
        return meta.get('command') == command_of(args)
    except UserError:
        return False


def is_there(folder: Path, args: argparse.Namespace) -> bool:
    """Whether a folder is what this command would make, and may stay; UserError where it is another."""
    if not os.path.lexists(folder) or args.overwrite:
        return False
    if not is_made_by(folder, args):
        raise UserError(f'{folder} exists and was made otherwise; add --overwrite, or take another NAME')
    print(f'{folder} is complete, by its sizes, and was made by this command; --check compares checksums, '
          '--overwrite makes it again')
    return True


def unfinished_folder(name: str) -> Path:
    """A new folder in data/ to make NAME in. Those of processes that were killed on this machine go away."""
    prefix = f'.{name}.partial-{socket.gethostname()}-'
    for left in Path('data').glob('.*'):
        owner = re.fullmatch(re.escape(prefix) + r'(\d+)-\w+', left.name)
        if owner and not is_alive(int(owner[1])):
            clear_away(left, Path('data') / name)
    folder = Path('data', f'{prefix}{os.getpid()}-{secrets.token_hex(4)}')
    folder.mkdir(parents=True)
    return folder


def clear_away(partial: Path, folder: Path) -> None:
    """Remove an unfinished folder. What it was about to replace comes back if nothing has taken its place."""
    with contextlib.suppress(OSError):
        if not os.path.lexists(folder):
            (partial / 'replaced').rename(folder)
    shutil.rmtree(partial, ignore_errors=True)
    with contextlib.suppress(OSError):
        folder.parent.rmdir()  # data/, if nothing else is in it


def prepare(args: argparse.Namespace) -> None:
    """Make data/NAME in a folder of its own, which gets that name when complete and goes away when not."""
    folder = Path('data') / args.name
    if is_there(folder, args):
        return
    partial = unfinished_folder(args.name)
    try:
        facts = write_toy(partial, args.seed) if args.name == 'toy' else write_corpus(partial, args)
        for name, n in facts['tokens'].items():
            if not n:
                raise UserError(f'there is no text for {name}.bin in {", ".join(args.text + args.val)}')
        shutil.rmtree(partial / 'cache', ignore_errors=True)
        facts['vocab_size'] = load_tokenizer(facts['tokenizer']).n_vocab
        facts |= {'dtype': token_dtype(facts['vocab_size']), 'command': command_of(args)}
        (partial / 'meta.json').write_text(json.dumps(facts, indent=1), encoding='utf-8')
        for name in ('train.bin', 'val.bin', 'meta.json', '.'):
            sync(partial / name)  # all of it is on the disk before it has its name
        if is_there(folder, args):  # another process has made it meanwhile
            return
        if args.overwrite and os.path.lexists(folder):
            folder.rename(partial / 'replaced')
        partial.rename(folder)
        sync(folder.parent)
        shutil.rmtree(folder / 'replaced', ignore_errors=True)
    finally:
        clear_away(partial, folder)
    try:
        report(folder, facts, whole_web=args.name == 'openwebtext' and not args.subsets and not args.text)
        print(end='', flush=True)
    except OSError:  # nobody reads it, but all is done
        drop_unwritable_output()


def report(folder: Path, facts: dict, whole_web: bool) -> None:
    """Print what was made."""
    n = facts['tokens']
    print(f'{folder}: {facts["documents"]:,} documents, {n["train"]:,} tokens to train on and {n["val"]:,} '
          f'held out, {facts["vocab_size"]:,} words')
    if 'entropy_per_token' in facts:
        print(f'The entropy of this world is {facts["entropy_per_token"]:.4f} nats per token.')
    if whole_web and (facts['documents'], n['train'] + n['val']) != (8_013_769, 9_040_017_095):
        print('The known OpenWebText has 8,013,769 documents and 9,040,017,095 tokens: this is another.')


def main(argv: list[str]) -> None:
    """Run the command line."""
    args = parse_args(argv)
    try:
        verify(Path('data') / args.name) if args.check else prepare(args)
    except UserError as error:
        fail('prepare.py', str(error))
    except OSError as error:
        fail('prepare.py', f'stopped, data/{args.name} is as it was: {error}', 1)


FIRST, INTERRUPTED = os.getpid(), []


def stop(signum: int, frame) -> None:
    """On Ctrl-C the processes that read and encode go on until the first one, which cleans up, ends them."""
    if os.getpid() == FIRST:
        INTERRUPTED.append(signum)
        raise KeyboardInterrupt


if __name__ == '__main__':
    signal.signal(signal.SIGINT, stop)
    if sys.stdout:
        sys.stdout.reconfigure(errors='replace')
    try:
        main(sys.argv[1:])
    except BaseException:
        if not INTERRUPTED:
            raise
        sys.exit(130)  # whatever the interruption became on its way through datasets
