"""Text in, tokens out: data/NAME/train.bin, val.bin and meta.json, which train.py reads.

    python prepare.py toy                               a small world whose truth is known; no download
    python prepare.py openwebtext --num-proc 16         the paper's corpus, from the Hugging Face Hub
    python prepare.py NAME --text FILE... [--val FILE...]   your own .txt, .jsonl, .parquet or .tar, plain, .gz or .xz

A bin is nothing but token ids, little-endian uint16 (uint32 for more than 65,535 words); every document ends with
the end-of-text id. Documents are the lines of a .jsonl (field "text"), the rows of a .parquet (column "text"),
the .txt members of a .tar, and any other file as a whole.
"""

import argparse
import gzip
import hashlib
import io
import json
import lzma
import math
import os
import random
import re
import shutil
import sys
import tarfile
import time
from functools import lru_cache
from pathlib import Path
from typing import Iterator

import numpy as np
import tiktoken

END_OF_TEXT = '<|endoftext|>'


class UserError(ValueError):
    """Something the user can mend; main prints it as one line and leaves with exit code 2."""


# -----------------------------------------------------------------------------
# The tokenizer. Its description, a dictionary of plain values, travels in meta.json and in every checkpoint.

GPT2 = {'name': 'gpt2'}


def toy_tokenizer(texts: list[str]) -> dict:
    """Description of a tokenizer in which every word of the texts, with the space before it, is one token."""
    pattern = r' ?\w+|[^\w\s]|\s+'
    pieces = sorted({piece for text in texts for piece in re.findall(pattern, text)})
    return {'name': 'toy', 'pattern': pattern, 'pieces': [p for p in pieces if len(p.encode()) > 1]}


@lru_cache(maxsize=4)
def _encoding(description: str) -> tiktoken.Encoding:
    d = json.loads(description)
    if d['name'] == 'gpt2':
        try:
            return tiktoken.get_encoding('gpt2')
        except Exception as error:  # requests, urllib3 and tiktoken each raise their own without a network
            raise UserError(f"GPT-2's vocabulary could not be fetched ({type(error).__name__}); connect to the network once, "
                            'or set TIKTOKEN_CACHE_DIR to a folder that holds it')
    tokens = [bytes([b]) for b in range(256)] + [piece.encode() for piece in d['pieces']]
    return tiktoken.Encoding(d['name'], pat_str=d['pattern'], mergeable_ranks={t: i for i, t in enumerate(tokens)},
                             special_tokens={END_OF_TEXT: len(tokens)})


def load_tokenizer(description: dict | None) -> tiktoken.Encoding:
    """The tiktoken.Encoding that a description stands for; its ids are 0 .. n_vocab - 1, end-of-text the last."""
    if not isinstance(description, dict) or (description.get('name') != 'gpt2' and 'pieces' not in description):
        raise UserError('this model carries no tokenizer that can be read; take a checkpoint of train.py, '
                        "or published weights with GPT-2's vocabulary")
    return _encoding(json.dumps(description))


# -----------------------------------------------------------------------------
# The toy world: a grammar that knows its own odds.
#
# Every claim of the paper has a counterpart whose truth is written down here: who is called she, who makes what,
# which words belong to a topic, which two words mean nearly the same, which word means two things.

SHE, HE, EVEN = (0.81, 0.09, 0.10), (0.09, 0.81, 0.10), (0.45, 0.45, 0.10)  # odds of she, he, they
PRONOUNS = [('she', 'her', 'Her'), ('he', 'his', 'His'), ('they', 'their', 'Their')]

# The paper's 40 role nouns (its Table 13), each with a tool and a place. A tool or place of a she-noun is also one of
# a he-noun: otherwise tools would go with pronouns, and the sense that names a nurse's tool would say she as well.
ROLES = {SHE: """nurse gloves clinic, teacher whistle school, cashier receipt shop, assistant calendar studio,
    secretary laptop bureau, cleaner mop corridor, receptionist telephone lobby, librarian clipboard library,
    hairdresser scissors annex, housekeeper bucket basement, baker apron bakery, tailor ruler workshop,
    attendant uniform station, counselor notebook cottage""",
         HE: """guard telephone clinic, janitor mop school, mechanic uniform shop, developer laptop studio,
    chief whistle bureau, mover gloves corridor, CEO calendar lobby, construction ruler library,
    laborer bucket annex, supervisor clipboard basement, driver receipt bakery, carpenter scissors workshop,
    sheriff notebook station, farmer apron cottage""",
         EVEN: """auditor ledger archive, clerk stamp counter, accountant invoice treasury, manager agenda branch,
    analyst chart exchange, editor pencil newsroom, writer manuscript garret, lawyer verdict courthouse,
    physician stethoscope hospital, cook ladle kitchen, designer sketch gallery, salesperson sample showroom"""}
ROLES = {noun: (odds, tool, place) for odds, lines in ROLES.items()
         for noun, tool, place in (entry.split() for entry in lines.split(','))}
ROLE_ODDS = {noun: odds for noun, (odds, _, _) in ROLES.items()}  # noun -> chances of she, he, they

# Each opening runs up to its pronoun; most are the prompts of the paper's Tables 14 and 15.
OPENINGS = ['When the {noun} came into the room, {she}', 'My {noun} said that {she}', 'My {noun} believes that {she}',
            'This one {noun} believes that {she}', 'This one {noun} believes {she}', 'My {noun} said {she}',
            'My {noun} believes {she}', 'The {noun} was with the car. When {she} arrived, {she}',
            'The {noun} was with the car. Then {she}', 'A {noun} went to chat over to chat before {she}',
            'While driving to the store, the {noun} looked over on the dash and then {she}',
            'Some {noun} asked to look over things, but {she}', 'I really liked my {noun}. In fact, {she}',
            'I really liked my {noun}. What I liked most was that {she}',
            'The {noun} came into the room. When {she} sat down, {she}', 'The {noun} came into the room. Then {she}',
            'I went over to the talk to the {noun}. What {she} told me was that {she}',
            'I went over to the talk to the {noun}. Why {she} smiled was that {she}',
            'Before lunch the {noun} told us that {she}', 'Yesterday the {noun} was late because {she}']
DEEDS = ['had lost the {tool}', 'needed a new {tool}', 'left for the {place}', 'had cleaned the {place}',
         'carried the {tool} to the {place}', 'found a {tool} near the {place}']
SEQUELS = ['{Her} {tool} stayed at the {place}.', 'Later {she} went back to the {place}.', 'All of us admired {her} {tool}.',
           'At the {place} {she} took {her} {tool}.', 'Nobody at the {place} had seen {her} {tool}.',
           'The {noun} smiled and {she} waved.']

PRODUCTS = {product: maker for maker, products in {
    'Apple': 'MacBook iPhone iPad', 'HP': 'Pavilion LaserJet Spectre', 'Sony': 'PlayStation Walkman Bravia',
    'Nintendo': 'GameCube Wii Famicom', 'Microsoft': 'Xbox Windows Excel', 'Toyota': 'Corolla Prius Camry',
    'Ford': 'Mustang Fiesta Bronco', 'Canon': 'PowerShot Pixma Rebel', 'Samsung': 'Galaxy Bespoke Odyssey',
    'Adobe': 'Photoshop Acrobat Lightroom'}.items() for product in products.split()}
PRODUCT_LINES = ['The {product} is made by {maker}.', 'I bought a {product} since I trust {maker}.',
                 'The company behind the {product} is {maker}.', 'As you know, the {product} comes from {maker}.',
                 'Whoever wants a {product} must ask {maker}.', 'My old {product} was repaired by {maker}.',
                 'Last spring {maker} showed a better {product}.']

# Eight of the topic labels of the paper's Table 10; a label stands where its words stand.
TOPICS = {label: [label, *words.split()] for label, words in {
    'music': 'guitar melody concert drums singer album rhythm piano chorus violin jazz lyrics',
    'food': 'pasta soup cheese dessert recipe bread salad pizza spices dinner sauce pancakes',
    'sports': 'football tennis goal league match referee marathon hockey champion racket sprint medal',
    'fashion': 'dress sandals velvet jacket perfume runway silk necklace boutique scarf handbag denim',
    'film': 'actor cinema screenplay director trailer sequel comedy camera scene oscar premiere villain',
    'travel': 'airport luggage passport beach hostel voyage map island train suitcase souvenir canyon',
    'gaming': 'console quest joystick avatar dungeon pixels arcade multiplayer boss level loot controller',
    'fitness': 'yoga treadmill muscles stretching protein jogging squats pulse diet stamina barbell cardio'}.items()}
TOPIC_LINES = ['We talked about {a} and {b}.', 'Nothing beats {a} with {b}.', 'I dream of {a}, {b} and {c}.',
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

# Pairs in order of likeness: the share s of contexts that the second word has in common with the first rises from
# 0 to 1 down each list and through both (SYNONYMS has the numbers).
ADJECTIVES = """old wooden, sweet hollow, loud narrow, gentle striped, round distant, smooth bitter, heavy shiny,
    clever tall, quiet dusty, warm plain, young fresh, thin pale, sharp rough, rich costly, kind friendly, strange odd,
    small tiny, big large, quick fast, happy glad"""
ADVERBS = """never twice, rarely gladly, openly badly, softly calmly, boldly firmly, sadly gravely, nearly almost,
    often frequently, slowly gradually, quickly rapidly"""
THINGS = """table window garden bridge village letter basket mirror blanket candle ladder statue puzzle lantern pillow
    ribbon kettle wagon cabinet fence hammer cushion bottle painting drawer feather bracelet curtain fountain
    barrel""".split()
ACTS = """opened painted moved watched answered counted folded washed painted-over wrapped lifted copied hid measured
    polished dropped""".replace('painted-over', 'sorted').split()
ADJECTIVE_LINES = ['What a {word} {thing} it was.', 'It looked like a {word} {thing}.', 'Here stands another {word} {thing}.']
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
KINDS = {'role': 0.42, 'product': 0.17, 'topic': 0.22, 'synonym': 0.14, 'homograph': 0.05}


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
    she, her, Her = dice.pick(PRONOUNS, odds)
    lines = [f'{dice.pick(OPENINGS)} {dice.pick(DEEDS)}.', dice.pick(SEQUELS)]
    return ' '.join(lines).format(noun=noun, tool=tool, place=place, she=she, her=her, Her=Her)


def product_story(dice: Dice) -> str:
    """Three sentences about products, each with its maker."""
    lines = []
    for _ in range(3):
        product = dice.pick(PRODUCTS)
        lines.append(dice.pick(PRODUCT_LINES).format(product=product, maker=PRODUCTS[product]))
    return ' '.join(lines)


def topic_story(dice: Dice) -> str:
    """Four sentences that stay on one topic."""
    words = TOPICS[dice.pick(TOPICS)]
    lines = []
    for line in [dice.pick(TOPIC_LINES) for _ in range(4)]:
        lines.append(line.format(**{slot: dice.pick(words) for slot in 'abc' if '{%s}' % slot in line}))
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

    No two ways of drawing give the same text, so this is the surprisal of the text itself, end included, and its
    mean over stories is the best mean loss per story that any model can reach.
    """
    stories = []
    dice = Dice(seed)
    for _ in range(n):
        dice.nats = 0.0
        kind = dice.pick(KINDS, list(KINDS.values()))
        stories.append((TELL[kind](dice), dice.nats))
    return stories


# -----------------------------------------------------------------------------
# Reading: any corpus becomes a datasets.Dataset of rows (text, end); a long document is several rows, the last with end.

PIECE = 1 << 18  # characters of a document held in memory at once
COMPRESSED = {'.gz', '.xz'}


def kind_of(path: Path) -> str:
    """How a file is read: 'json', 'parquet', 'tar' or, for any extension not known, 'text'."""
    suffixes = [s for s in path.suffixes if s not in COMPRESSED]
    known = {'.jsonl': 'json', '.json': 'json', '.parquet': 'parquet', '.tar': 'tar'}
    return known.get(suffixes[-1] if suffixes else '', 'text')


def open_text(path: Path) -> io.TextIOBase:
    """A text file for reading, unpacked on the way where its name ends in .gz or .xz."""
    opener = {'.gz': gzip.open, '.xz': lzma.open}.get(path.suffix, open)
    return opener(path, 'rt', encoding='utf-8', newline='')


def pieces_of(stream: io.TextIOBase) -> Iterator[str]:
    """The text of a stream in pieces of about PIECE characters that encode as the whole does.

    Both tokenizers split a text before white space that follows something else, so a cut there changes no token.
    """
    text = ''
    while more := stream.read(PIECE):
        text += more
        cuts = [m.end() for m in re.finditer(r'\S(?=\s)', text[-PIECE // 4:])]
        if cuts:
            cut = len(text) - len(text[-PIECE // 4:]) + cuts[-1]
            yield text[:cut]
            text = text[cut:]
        elif len(text) > 8 * PIECE:  # a text without white space must be cut somewhere
            yield text
            text = ''
    if text:
        yield text


def rows_of_text(path: Path) -> Iterator[dict]:
    """Rows of a file that is one document."""
    with open_text(path) as stream:
        held = None
        for piece in pieces_of(stream):
            if '\0' in piece:
                raise UserError(f'{path} is not text: it holds zero bytes; give UTF-8 text, .jsonl, .parquet or .tar')
            if held is not None:
                yield {'text': held, 'end': False}
            held = piece
        if held is not None:
            yield {'text': held, 'end': True}


def rows_of_tar(path: Path) -> Iterator[dict]:
    """Rows of an OpenWebText archive: a tar of .xz members that are tars of .txt documents, streamed, never unpacked."""
    with tarfile.open(path, 'r|*') as outer:
        for member in outer:
            if member.isfile() and member.name.endswith('.txt'):
                yield {'text': tidy(outer.extractfile(member).read()), 'end': True}
            elif member.isfile() and member.name.endswith('.xz'):
                with tarfile.open(fileobj=lzma.open(outer.extractfile(member)), mode='r|') as inner:
                    for document in inner:
                        if document.isfile() and document.name.endswith('.txt'):
                            yield {'text': tidy(inner.extractfile(document).read()), 'end': True}


def tidy(document: bytes) -> str:
    """An OpenWebText document as the published dataset has it: three or more newlines become two, ends stripped."""
    return re.sub(r'\n{3,}', '\n\n', document.decode('utf-8')).strip()


def rows_of_files(paths: list[str]) -> Iterator[dict]:
    """Rows of text files and archives; what cannot be read is a UserError that names the file."""
    for path in map(Path, paths):
        try:
            yield from (rows_of_tar if kind_of(path) == 'tar' else rows_of_text)(path)
        except UnicodeDecodeError as error:
            raise UserError(f'{path} is not UTF-8 text (byte {error.object[error.start]:#04x}); '
                            'give UTF-8 text, .jsonl, .parquet or .tar')
        except (EOFError, lzma.LZMAError, tarfile.TarError, OSError) as error:
            raise UserError(f'{path} cannot be read: {error or "it ends too early"}')


def read_corpus(files: list[str], cache: Path, num_proc: int) -> list:
    """The rows (text, end) of all files, one datasets.Dataset for each kind of file, kept on disk below cache."""
    import datasets
    parts = []
    for kind in ('json', 'parquet', 'text'):  # one reader each; archives are read like texts
        chosen = [f for f in files if ('text' if kind_of(Path(f)) == 'tar' else kind_of(Path(f))) == kind]
        if not chosen:
            continue
        workers = min(num_proc, len(chosen))
        try:
            if kind == 'text':
                features = datasets.Features({'text': datasets.Value('large_string'), 'end': datasets.Value('bool')})
                part = datasets.Dataset.from_generator(rows_of_files, features=features, cache_dir=str(cache), num_proc=workers,
                                                       gen_kwargs={'paths': chosen}, writer_batch_size=100)
            else:
                part = datasets.load_dataset(kind, data_files=chosen, split='train', cache_dir=str(cache), num_proc=workers)
        except Exception as error:  # datasets wraps what went wrong; the innermost cause is what a person can use
            while error.__cause__ or error.__context__:
                error = error.__cause__ or error.__context__
            if isinstance(error, UserError):
                raise error
            raise UserError(f'{", ".join(chosen)} cannot be read as {kind}: {str(error).splitlines()[0]}')
        if 'string' not in str(part.features.get('text')):
            raise UserError(f'{", ".join(chosen)} has no field "text" that holds strings; '
                            f'its fields are {", ".join(part.column_names)}')
        parts.append(part.select_columns([c for c in ('text', 'end') if c in part.column_names]))
    return parts


def openwebtext_files(subsets: int | None) -> list[str]:
    """Local copies of the files of Skylion007/openwebtext, downloaded or from the Hub's cache.

    Its loading script is refused by datasets 4 and later. So: its Parquet files if the repository has them whole,
    else (and with --subsets) its own archives.
    """
    from huggingface_hub import HfApi, hf_hub_download
    repo = dict(repo_id='Skylion007/openwebtext', repo_type='dataset')
    try:
        names = HfApi().list_repo_files(**repo)
        parquet = sorted(n for n in names if n.endswith('.parquet'))
        total = [int(m[1]) for m in (re.search(r'-of-(\d+)\.parquet$', n) for n in parquet) if m]
        whole = bool(parquet) and len(parquet) == len(total) == total[0]
        archives = [f'subsets/urlsf_subset{i:02d}.tar' for i in range(subsets or 21)]
        return [hf_hub_download(filename=name, **repo) for name in (parquet if whole and not subsets else archives)]
    except Exception as error:  # the Hub's client and its HTTP library raise a dozen kinds without a network
        raise UserError(f'OpenWebText could not be fetched from the Hugging Face Hub ({type(error).__name__}); connect, or '
                        'give its archives by path: python prepare.py openwebtext --text urlsf_subset*.tar')


# -----------------------------------------------------------------------------
# Encoding and writing.


def encode_rows(batch: dict, tokenizer: dict) -> dict:
    """Token ids of each row, end-of-text after the last row of a document; an empty document has none."""
    encoding = load_tokenizer(tokenizer)
    ends = batch.get('end') or [True] * len(batch['text'])
    dtype = token_dtype(encoding.n_vocab)
    ids = []
    for text, end in zip(batch['text'], ends):
        row = encoding.encode_ordinary(text or '')
        ids.append(np.array(row + [encoding.eot_token] * (end and bool(row)), dtype=dtype))
    return {'ids': ids, 'end': ends}


def token_dtype(n_vocab: int) -> str:
    """'uint16' while every id fits, else 'uint32'."""
    return 'uint16' if n_vocab <= 1 << 16 else 'uint32'


def encode_corpus(parts: list, tokenizer: dict, num_proc: int):
    """The parts of a corpus as one dataset of rows (ids, end), encoded in num_proc processes."""
    import datasets
    dtype = token_dtype(load_tokenizer(tokenizer).n_vocab)
    features = datasets.Features({'ids': datasets.LargeList(datasets.Value(dtype)), 'end': datasets.Value('bool')})
    encoded = [part.map(encode_rows, batched=True, batch_size=100, fn_kwargs={'tokenizer': tokenizer}, features=features,
                        remove_columns=part.column_names, num_proc=min(num_proc, max(1, len(part))), desc='Encoding',
                        writer_batch_size=100)
               for part in parts]
    return datasets.concatenate_datasets(encoded)


def blocks(encoded) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """The rows of an encoded corpus, some at a time: all their ids in one array, their lengths, their ends."""
    for table in encoded.with_format('arrow').iter(batch_size=200):
        ids = table['ids'].combine_chunks()
        yield (ids.flatten().to_numpy(), np.diff(ids.offsets.to_numpy()).astype(np.int64),
               table['end'].to_numpy(zero_copy_only=False))


def hold_out(lengths: np.ndarray, ends: np.ndarray, seed: int, of_documents: float, of_tokens: float) -> np.ndarray:
    """How many tokens at the end of each row are held out for validation.

    Whole documents in a seeded random order, until both shares are reached; if the last one taken is far too
    large for that (a lone book), only its end is held out.
    """
    document = np.concatenate([[0], np.cumsum(ends)[:-1]]).astype(np.int64)  # of each row
    tokens = np.bincount(document, weights=lengths).astype(np.int64)  # of each document
    order = np.random.default_rng(seed).permutation(len(tokens))
    so_far = np.cumsum(tokens[order])
    target = max(1, round(of_tokens * so_far[-1]))
    n = max(math.ceil(of_documents * len(tokens)), int(np.searchsorted(so_far, target)) + 1)
    held = np.zeros(len(tokens), dtype=np.int64)
    held[order[:n]] = tokens[order[:n]]
    if n == len(tokens) or (of_tokens and so_far[n - 1] > 2 * target):
        held[order[n - 1]] = max(1, target - (so_far[n - 2] if n > 1 else 0))
    after = np.cumsum(lengths[::-1])[::-1] - lengths  # tokens of all later rows
    after -= np.concatenate([np.cumsum(tokens[::-1])[::-1][1:], [0]])[document]  # now: of later rows of its document
    return np.clip(held[document] - after, 0, lengths)


def split_rows(ids: np.ndarray, lengths: np.ndarray, held: np.ndarray, eot: int) -> tuple[np.ndarray, np.ndarray]:
    """The ids of some rows, parted in training and held-out ones; a document cut in two gets an end-of-text there."""
    starts = np.repeat(np.cumsum(lengths) - lengths, lengths)
    out = np.arange(len(ids)) - starts >= np.repeat(lengths - held, lengths)
    cut = np.flatnonzero(~out[:-1] & out[1:] & (ids[:-1] != eot)) if len(ids) else []
    return np.insert(ids[~out], [np.count_nonzero(~out[:c + 1]) for c in cut], eot).astype(ids.dtype), ids[out]


def write_bins(folder: Path, parts: Iterator[tuple[np.ndarray, np.ndarray]]) -> dict:
    """Append pairs of (training, held-out) ids to train.bin and val.bin; their counts and checksums, for meta.json."""
    names = ('train', 'val')
    digests, counts = [hashlib.sha256() for _ in names], [0, 0]
    with open(folder / 'train.bin', 'wb') as train, open(folder / 'val.bin', 'wb') as val:
        for part in parts:
            for i, (ids, file) in enumerate(zip(part, (train, val))):
                data = ids.astype(ids.dtype.newbyteorder('<')).tobytes()
                file.write(data)
                digests[i].update(data)
                counts[i] += len(ids)
    return {'tokens': dict(zip(names, counts)), 'sha256': {n: d.hexdigest() for n, d in zip(names, digests)}}


def write_corpus(folder: Path, files: list[str], val_files: list[str], share: tuple[float, float], args) -> dict:
    """Bins of text files, split by share of (documents, tokens) unless there are val_files; facts for meta.json."""
    encoded = encode_corpus(read_corpus(files, folder / 'cache', args.num_proc), GPT2, args.num_proc)
    facts = [(lengths, ends) for _, lengths, ends in blocks(encoded)]
    lengths, ends = (np.concatenate(column) for column in zip(*facts)) if facts else (np.zeros(0, int),) * 2
    if not lengths.sum():
        raise UserError(f'{", ".join(files)}: no text in it')
    held = np.zeros_like(lengths) if val_files else hold_out(lengths, ends, args.seed, *share)
    val = None
    if val_files:
        val = encode_corpus(read_corpus(val_files, folder / 'cache' / 'val', args.num_proc), GPT2, args.num_proc)

    def parts() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        row = 0
        for ids, n, _ in progress(blocks(encoded), 'Writing', len(encoded)):
            yield split_rows(ids, n, held[row:row + len(n)], load_tokenizer(GPT2).eot_token)
            row += len(n)
        for ids, _, _ in blocks(val) if val else ():
            yield ids[:0], ids

    return {'tokenizer': GPT2, 'documents': int(ends.sum()), **write_bins(folder, parts())}


def progress(items: Iterator[tuple], title: str, rows: int) -> Iterator[tuple]:
    """The same items, with a bar that counts their rows."""
    from datasets.utils import tqdm
    with tqdm(total=rows, desc=title, unit=' rows') as bar:
        for item in items:
            yield item
            bar.update(len(item[1]))


def write_toy(folder: Path, seed: int, n_train: int = 60_000, n_val: int = 4_000) -> dict:
    """Bins of the toy world, and its own entropy, which no model can beat."""
    stories = toy_stories(seed, n_train + n_val)
    tokenizer = toy_tokenizer([text for text, _ in stories])
    encoding = load_tokenizer(tokenizer)
    ids = [encoding.encode_ordinary(text) + [encoding.eot_token] for text, _ in stories]
    train, val = (np.array([i for row in rows for i in row], dtype='uint16') for rows in (ids[:n_train], ids[n_train:]))
    nats = [surprisal for _, surprisal in stories]
    return {'tokenizer': tokenizer, 'documents': len(stories),
            'entropy_per_token': sum(nats) / (len(train) + len(val)),
            'val_entropy_per_token': sum(nats[n_train:]) / len(val),
            'entropy_is': 'exact: mean surprisal, in nats, of whole stories, end-of-text included; each has one derivation',
            **write_bins(folder, iter([(train, val)]))}


# -----------------------------------------------------------------------------
# The command line.


def parse_args(argv: list[str]) -> argparse.Namespace:
    """The command line; argparse leaves with exit code 2 and one line where it does not fit."""
    parser = argparse.ArgumentParser(prog='prepare.py', description='Write data/NAME/{train.bin,val.bin,meta.json}.',
                                     usage='prepare.py NAME [--text FILE ...] [--val FILE ...] [--subsets N] [--num-proc N] '
                                           '[--seed S] [--overwrite]')
    parser.error = lambda message: parser.exit(2, f'prepare.py: {message}; see python prepare.py --help\n')
    parser.add_argument('name', metavar='NAME', help='toy, openwebtext, or any name for the files of --text')
    parser.add_argument('--text', nargs='+', metavar='FILE', default=[],
                        help='.jsonl (field "text"), .parquet (column "text"), .tar of OpenWebText, or text (a document a file); '
                             'plain, .gz or .xz')
    parser.add_argument('--val', nargs='+', metavar='FILE', default=[],
                        help='files to validate on; without them documents with about 1%% of the tokens are held out')
    parser.add_argument('--subsets', type=int, metavar='N', help='only the first N of the 21 archives of openwebtext')
    parser.add_argument('--num-proc', type=int, metavar='N', default=os.cpu_count(), help='processes (default: all cores)')
    parser.add_argument('--seed', type=int, metavar='S', default=0, help='of the toy world and of the held-out split')
    parser.add_argument('--overwrite', action='store_true', help='replace data/NAME')
    args = parser.parse_args(argv)
    if not re.fullmatch(r'\w[\w.-]*', args.name):
        parser.error(f'NAME is {args.name!r}; it may hold letters, digits, _, - and . only')
    if args.name == 'toy' and (args.text or args.val):
        parser.error('toy makes its own text; give your files another NAME')
    if args.name not in ('toy', 'openwebtext') and not args.text:
        parser.error(f'NAME is {args.name!r}; without --text FILE it can be toy or openwebtext')
    if args.subsets is not None and (args.name != 'openwebtext' or args.text or not 1 <= args.subsets <= 21):
        parser.error('--subsets takes 1 to 21 and goes with openwebtext alone')
    if args.num_proc < 1:
        parser.error(f'--num-proc is {args.num_proc}; it must be at least 1')
    for path in map(Path, args.text + args.val):
        if not path.is_file():
            parser.error(f'{path} is not a file')
    return args


def command_of(args: argparse.Namespace) -> dict:
    """What a result depends on: the same command on the same files gives the same bins."""
    stamp = [[str(Path(f).resolve()), os.stat(f).st_size, os.stat(f).st_mtime_ns] for f in args.text + args.val]
    return {'name': args.name, 'files': stamp, 'n_val_files': len(args.val), 'subsets': args.subsets, 'seed': args.seed}


def already_there(folder: Path, args: argparse.Namespace) -> bool:
    """Whether folder is complete and made by the same command; UserError where it is anything else."""
    if args.overwrite or not folder.exists():
        return False
    try:
        same = json.loads((folder / 'meta.json').read_text())['command'] == command_of(args)
    except (OSError, ValueError, KeyError, TypeError):
        same = False
    if not same or not all((folder / f'{name}.bin').is_file() for name in ('train', 'val')):
        raise UserError(f'{folder} exists and was made otherwise; add --overwrite to replace it, or take another NAME')
    return True


def write_folder(folder: Path, args: argparse.Namespace) -> dict:
    """Everything for data/NAME into folder; meta.json comes last."""
    if args.name == 'toy':
        facts = write_toy(folder, args.seed)
    else:
        # the paper holds out 0.0005 of the documents of OpenWebText; a small corpus needs about 1% of its tokens
        share = (0.0005, 0.0) if args.name == 'openwebtext' else (0.0005, 0.01)
        files = args.text or openwebtext_files(args.subsets)
        facts = write_corpus(folder, files, args.val, share, args)
    facts['vocab_size'] = load_tokenizer(facts['tokenizer']).n_vocab
    facts['dtype'] = token_dtype(facts['vocab_size'])
    facts['command'] = command_of(args)
    facts['made'] = time.strftime('%Y-%m-%d %H:%M:%S')
    shutil.rmtree(folder / 'cache', ignore_errors=True)
    (folder / 'meta.json').write_text(json.dumps(facts, indent=1))
    return facts


def prepare(args: argparse.Namespace) -> None:
    """Make data/NAME: in a folder of its own, renamed when complete, removed when not."""
    folder = Path('data') / args.name
    if already_there(folder, args):
        print(f'{folder} is complete and made by this command; --overwrite makes it again')
        return
    partial = Path('data') / f'.{args.name}.partial-{os.getpid()}'
    partial.mkdir(parents=True)
    try:
        facts = write_folder(partial, args)
        if folder.exists():
            folder.rename(partial / 'replaced')
        partial.rename(folder)
        shutil.rmtree(folder / 'replaced', ignore_errors=True)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    tokens = facts['tokens']
    print(f'{folder}: {facts["documents"]:,} documents, {tokens["train"]:,} tokens to train on, {tokens["val"]:,} held out, '
          f'vocabulary {facts["vocab_size"]:,}')
    if 'entropy_per_token' in facts:
        print(f'entropy of this world: {facts["entropy_per_token"]:.4f} nats per token')
    whole = args.name == 'openwebtext' and not args.subsets and not args.text
    if whole and (facts['documents'], sum(tokens.values())) != (8_013_769, 9_040_017_095):
        print('note: OpenWebText is known to have 8,013,769 documents and 9,040,017,095 tokens')


def main(argv: list[str]) -> None:
    """Run the command line."""
    args = parse_args(argv)
    try:
        prepare(args)
    except UserError as error:
        print(f'prepare.py: {error}', file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == '__main__':
    main(sys.argv[1:])
