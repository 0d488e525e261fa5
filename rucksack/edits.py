"""Parse what people type: words, A/B, bags, WORD:SENSES, "WORD: OLD -> NEW", strengths, edit files.

Where a flag takes a word, it also takes a list: a,b,c, or @FILE with one word per line. First, a
list is expanded to one phrase per word. Then each phrase is parsed into an object, before the model
is loaded. Last, the model and its encoding turn words into ids and phrases into an edit.
"""

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from tiktoken import Encoding
from torch import Tensor

from rucksack.cli import UserError, bfloat16_unit, one_line, progress, write_file
from rucksack.model import Backpack
from rucksack.paper.lists import TOPICS
from rucksack.senses import (
    STRENGTHS,
    Edit,
    Words,
    affinities,
    compose,
    occurrences,
    replace_word,
    scale_senses,
    separation,
    topic,
)
from rucksack.tokenizer import encode

PROMPT = 'When the nurse came into the room,'
NUMBER = r'(?:[0-9]{1,4}(?:\.[0-9]*)?|\.[0-9]+)'
LARGEST_FACTOR = 1e12  # for the product over all edits; far larger ones overflow


# -----------------------------------------------------------------------------
# Lists.


def read_lines(text: str) -> list[str]:
    """Read the lines of the file in @FILE, without blank ones; UserError if there are none."""
    path = text.removeprefix('@')
    try:
        lines = Path(path).read_text(encoding='utf-8-sig').split('\n')
    except (OSError, ValueError) as error:
        raise UserError(f'{text}: {one_line(error)}; @FILE must be a text file, one item per line')
    lines = [line for line in lines if line.strip()]
    if not lines:
        raise UserError(f'{text}: the file is empty; write one item per line')
    return lines


def word_list(text: str) -> list[str]:
    """List the words in a,b,c or in @FILE; a text with an empty part, such as ",", is one word."""
    if re.match('@.', text):
        return [line.strip() for line in read_lines(text)]
    words = [word.strip() for word in text.split(',')]
    return words if all(words) else [text]


def phrase_lists(texts: list[str]) -> list[str]:
    """Expand lists to one phrase per word, text after text."""
    return [phrase for text in texts for phrase in phrase_list(text)]


def phrase_list(text: str) -> list[str]:
    """Expand a list to one phrase per word: doctor,nurse:10 becomes doctor:10 and nurse:10."""
    words, colon, rest = text.rpartition(':')
    if not words:
        return word_list(text)
    return [f'{word}{colon}{rest}' for word in word_list(words)]


def bag_text(text: str) -> str:
    """Return a bag of words with the words of @FILE written out."""
    if re.match('@.', text):
        return ', '.join(word_list(text))
    return text


# -----------------------------------------------------------------------------
# Phrases.


@dataclass(frozen=True)
class SensesOf:
    """WORD:SENSES, as in nurse:10, *:3-5 or nurse:she/he."""

    word: str
    numbers: list[int]
    pair: tuple[str, str] | None = None  # (A, B): the sense that most separates A from B


def parts_of(text: str, pattern: str, form: str) -> tuple[str, ...]:
    """Match a pattern with all of a text and return its groups; UserError says the form needed."""
    match = re.fullmatch(pattern, text.strip())
    if not match:
        raise UserError(f'{text!r} is not {form}')
    return match.groups()


def parse_pair(text: str) -> tuple[str, str]:
    """Parse the two words in A/B."""
    a, b = parts_of(text, r'(\S.*?)\s*/\s*(\S.*)', 'A/B, two words as in she/he')
    if a == b:
        raise UserError(f'{text!r} is one word twice; give two, as in she/he')
    return a, b


def parse_bag(text: str) -> list[str]:
    """Parse the words in "A, B", A+B or A B, or take the words of a topic of Table 10."""
    words = TOPICS.get(text.strip(), re.findall(r'[^\s,+]+', text))
    if not words:
        raise UserError('the bag of words is empty; give words, as in music+guitar')
    return words


def parse_numbers(text: str) -> list[int]:
    """Parse the sense numbers in 3,10 or 3-5."""
    spans = []
    if re.fullmatch(r'(\s*\d{1,4}(-\d{1,4})?\s*,)+', f'{text},'):
        for part in text.split(','):
            first, _, last = part.partition('-')
            spans.append(range(int(first), int(last or first) + 1))
    if not spans or not all(spans):  # 5-3 is an empty range
        raise UserError(f'{text!r} is neither sense numbers, as in 3-5,10, nor A/B')
    return [number for span in spans for number in span]


def parse_senses_of(text: str) -> SensesOf:
    """Parse WORD:SENSES; *:A/B is refused, as the sense differs by word."""
    word, which = parts_of(text, r'(?!\*.*/)(.*\S)\s*:\s*(\S.*)',
                           'WORD:SENSES, as in nurse:10, nurse:3-5,10, nurse:she/he or *:10')
    if '/' in which:
        return SensesOf(word, [], parse_pair(which))
    return SensesOf(word, parse_numbers(which))


def parse_scaling(text: str) -> tuple[SensesOf, float]:
    """Parse the senses and the factor in WORD:SENSES=F."""
    senses, factor = parts_of(text, rf'(.+)=(-?{NUMBER})',
                              'WORD:SENSES=FACTOR, as in nurse:10=0.5')
    return parse_senses_of(senses), float(factor)


def parse_replacement(text: str) -> tuple[str, str, str]:
    """Parse WORD, OLD and NEW in "WORD: OLD -> NEW"."""
    return parts_of(text, r'(.*\S)\s*:\s*(\S.*?)\s*->\s*(\S.*)',
                    '"WORD: OLD -> NEW", as in "MacBook: Apple -> HP"')


def parse_strength(text: str) -> tuple[float, ...]:
    """Parse a strength: a row of Table 11, or four factors separated by commas."""
    parts_of(text, rf'[0-3]|{NUMBER}(,{NUMBER}){{3}}',
             'a strength: 0, 1, 2 or 3, or four numbers, as in 3.3,3.3,3,1')
    numbers = text.split(',')
    if len(numbers) == 1:
        return STRENGTHS[int(text)]
    return tuple(map(float, numbers))


def write_out(texts: dict[str, list[str]]) -> dict[str, list[str]]:
    """Expand lists in the values of EDIT_FLAGS to one phrase per word."""
    phrases = dict(texts)
    for flag in ('senses_off', 'senses_scale', 'replace'):
        phrases[flag] = phrase_lists(texts[flag])
    phrases['topic'] = [bag_text(text) for text in texts['topic']]
    return phrases


# The flags of sample.py that edit, in the order in which they apply, and how to parse their values.
EDIT_FLAGS = {
    'senses_off': parse_senses_of,
    'senses_scale': parse_scaling,
    'replace': parse_replacement,
    'topic': parse_bag,
    'strength': parse_strength}


def parse_edits(texts: dict[str, list[str]]) -> dict[str, list]:
    """Parse the values of EDIT_FLAGS into edits, under the same names."""
    edits = {}
    for flag, parse in EDIT_FLAGS.items():
        edits[flag] = [parse(text) for text in texts[flag]]
    if len(edits['topic']) != len(edits['strength']):
        raise UserError(f'there are {len(edits["topic"])} topics and {len(edits["strength"])} '
                        'strengths; give one --strength for each --topic, or one for all')
    factors = [factor for _, factor in edits['senses_scale']]
    factors += [max(weights) for weights in edits['strength']]
    product = math.prod(max(1, abs(factor)) for factor in factors)
    if product > LARGEST_FACTOR:
        raise UserError(f'the factors of all edits multiply to {product:.0e}; '
                        f'the product may be at most {LARGEST_FACTOR:.0e}')
    return edits


def write_edit(path: Path, n_vocab: int, texts: dict[str, list[str]]) -> None:
    """Write the values of EDIT_FLAGS to a file, for read_edit."""
    contents = {'vocabulary': n_vocab, 'edits': texts}
    write_file(path, json.dumps(contents, indent=1) + '\n')


def read_edit(path: str | Path, n_vocab: int) -> dict[str, list[str]]:
    """Read the values of EDIT_FLAGS from a file saved by sample.py --save-edit.

    UserError, saying what is wrong, if the file is damaged or for a vocabulary of another size.
    """
    try:
        file = json.loads(Path(path).read_text(encoding='utf-8'))
        check_parts(file, {'vocabulary': int, 'edits': dict}, 'the file')
        texts = file['edits']
        check_parts(texts, dict.fromkeys(EDIT_FLAGS, list), 'edits')
        for flag, items in texts.items():
            for item in items:
                if not isinstance(item, str):
                    raise ValueError(f'{flag} has {item!r}; every item must be a string')
        parse_edits(texts)
        if file['vocabulary'] != n_vocab:
            raise ValueError(f'vocabulary is {file["vocabulary"]}, but this model has {n_vocab} '
                             'ids; save the edit again with this model')
        return texts
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f'{path}: {one_line(error)}; --edit takes a file of sample.py --save-edit')


def combined(edits: list[dict[str, list[str]]]) -> dict[str, list[str]]:
    """Join edits into one: for each of EDIT_FLAGS, all values in order."""
    return {flag: [text for texts in edits for text in texts[flag]] for flag in EDIT_FLAGS}


def check_parts(found, parts: dict[str, type], where: str) -> None:
    """Raise ValueError unless found is a dictionary with these keys, and values of these types."""
    is_dictionary = isinstance(found, dict)
    if not is_dictionary or found.keys() != parts.keys():
        what = ', '.join(found) if is_dictionary else type(found).__name__
        raise ValueError(f'{where} has {what or "nothing"}, not {", ".join(parts)}')
    for name, kind in parts.items():
        if type(found[name]) is not kind:
            raise ValueError(f'{name} is {found[name]!r}; it must be of type {kind.__name__}')


# -----------------------------------------------------------------------------
# Words and ids.


def quoted(encoding: Encoding, token: int) -> str:
    """Write a token for people to read: in quotes, with control characters escaped."""
    return repr(encoding.decode_single_token_bytes(token).decode('utf-8', errors='replace'))


def pieces_of(encoding: Encoding, word: str) -> list[int]:
    """Find the ids of a word in a text, with its leading space; UserError for an unknown word.

    A word is unknown if a tokenizer of whole words splits off the space and spells the rest out.
    """
    ids = encoding.encode_ordinary(f' {word}')
    is_space_apart = encoding.decode_single_token_bytes(ids[0]) == b' '
    is_spelled_out = is_space_apart and encoding.name == 'words'
    if is_spelled_out or not word:
        return [word_id(encoding, word)]
    return ids


def word_id(encoding: Encoding, word: str) -> int:
    """Find the id of a word inside a text, with its leading space; UserError if it has several."""
    ids = encoding.encode_ordinary(f' {word}')
    if len(ids) != 1 or not word:
        pieces = ' + '.join(quoted(encoding, i) for i in ids)
        raise UserError(f'{word!r} is not one token (it splits into {pieces}); choose another word')
    return ids[0]


def word_forms(encoding: Encoding, word: str) -> list[int | tuple[int, ...]]:
    """Find the ids of a word inside a text and at its start.

    The form at the start counts only if both forms are one token or both are several.
    """
    forms = [pieces_of(encoding, word), encoding.encode_ordinary(word)]
    if len(forms[0]) == 1:
        return [ids[0] for ids in forms if len(ids) == 1]
    return [tuple(ids) for ids in forms if len(ids) > 1]


def describe(encoding: Encoding, word: str) -> str:
    """Name the word; if it has several tokens, say where an edit of it applies."""
    pieces = [quoted(encoding, i) for i in pieces_of(encoding, word)]
    if len(pieces) == 1:
        return word
    return f"{word} (its last token {pieces[-1]}, after {' + '.join(pieces[:-1])})"


def bag_ids(encoding: Encoding, words: list[str]) -> list[int]:
    """Find the ids of a bag of words, each once; a word of several tokens gives all of them.

    The published code takes only a word's first token. UserError for an unknown word.
    """
    ids = {i for word in words for i in pieces_of(encoding, word)}
    return sorted(ids)


def read_prompt(start: str, encoding: Encoding, block_size: int) -> tuple[list[int], list[str]]:
    """Encode a prompt: its last block_size ids (end-of-text if there are none), and notices."""
    ids = encode(encoding, start) or [encoding.eot_token]
    notices = []
    if len(ids) > block_size:
        notices.append(f'The prompt has {len(ids)} tokens; the model reads the last {block_size}.')
    if encoding.name == 'words':
        words = dict.fromkeys(re.findall(r'\w+', start))
        unknown = [word for word in words if is_unknown(encoding, word)]
        if unknown:
            notices.append(f'The model has never seen {", ".join(unknown[:8])}: '
                           'it reads unknown words letter by letter.')
    return ids[-block_size:], notices


def is_unknown(encoding: Encoding, word: str) -> bool:
    """Tell whether a word is several tokens, both inside a text and at its start."""
    inside = encoding.encode_ordinary(f' {word}')
    at_start = encoding.encode_ordinary(word)
    return len(inside) > 1 and len(at_start) > 1


# -----------------------------------------------------------------------------
# Scores of the whole vocabulary.

IDS_AT_ONCE = 128  # for Eq. 17 of Small, the senses of these have 103M logits


def over_vocabulary(model: Backpack, what: str, score: Callable[[Backpack, Tensor], Tensor]
                    ) -> Tensor:
    """Score all V ids, a slice (n,) at a time, and show progress: (V, ..)."""
    ids = torch.arange(model.config.n_vocab, device=model.wte.weight.device)  # (V,)
    slices = progress(ids.split(IDS_AT_ONCE), what)
    return torch.cat([score(model, some_ids) for some_ids in slices])


def scores_of_bags(model: Backpack, bags: list[list[int]]) -> Tensor:
    """Compute Eq. 17 for all ids, (V, k, bags); in bfloat16 for a large vocabulary, if fast."""
    E = model.wte.weight
    is_large = model.config.n_vocab > 1 << 14 and E.dtype == torch.float32
    in_bfloat16 = is_large and bfloat16_unit(str(E.device)) is not None
    with torch.autocast(E.device.type, torch.bfloat16, enabled=in_bfloat16):
        return over_vocabulary(model, 'scoring senses', partial(affinities, bags=bags))


# -----------------------------------------------------------------------------
# From phrases to an edit.


def find_words(word: str, encoding: Encoding) -> tuple[Words, str]:
    """Find the ids of a word and describe it; * is every word."""
    if word == '*':
        return None, 'every word'
    return word_forms(encoding, word), describe(encoding, word)


def find_senses(phrase: SensesOf, model: Backpack, encoding: Encoding
                ) -> tuple[Words, list[int], str]:
    """Find the words and the sense numbers of a phrase, and describe them."""
    words, word = find_words(phrase.word, encoding)
    numbers = phrase.numbers
    reason = ''
    if phrase.pair:
        last_piece = pieces_of(encoding, phrase.word)[-1]
        number, reason = separating_sense(last_piece, phrase.pair, model, encoding)
        numbers = [number]
    last = model.config.n_sense - 1
    if max(numbers) > last:
        raise UserError(f'{phrase.word} has no sense {max(numbers)}; choose from 0 to {last}')
    noun = 'sense' if len(numbers) == 1 else 'senses'
    return words, numbers, f'{noun} {", ".join(map(str, numbers))} of {word}{reason}'


def separating_sense(w: int, pair: tuple[str, str], model: Backpack, encoding: Encoding
                     ) -> tuple[int, str]:
    """Find the sense of the id w that most separates a pair, and say by how much it does."""
    a, b = (word_id(encoding, word) for word in pair)
    ids = torch.tensor([w], device=model.wte.weight.device)
    scores = separation(model, ids, a, b)[0]  # (k,)
    by_size = scores.abs().argsort(descending=True).tolist()
    best = by_size[0]
    second = ''
    if len(by_size) > 1:
        second = f'; sense {by_size[1]}: {scores[by_size[1]]:+.2f}'
    return best, (f', which most separates {quoted(encoding, a)} from {quoted(encoding, b)} '
                  f'(by {scores[best]:+.2f} logits{second})')


def absent(words: Words, prompts: Sequence[Tensor]) -> str:
    """Return a remark if there are prompts (1, T) and none has one of the words, else ''."""
    if not prompts or any(occurrences(idx, words).any() for idx in prompts):
        return ''
    return ' (does not occur: no effect on the next word)'


def make_edit(edits: dict[str, list], model: Backpack, encoding: Encoding,
              prompts: Sequence[Tensor] = ()) -> tuple[Edit, list[str]]:
    """Make an edit from the output of parse_edits; also returns a line about each part.

    prompts are the texts (1, T) to edit, if known; a line says if they lack the edited word.
    """
    steps = []
    lines = []
    off = [(phrase, 0.0) for phrase in edits['senses_off']]
    for phrase, factor in off + edits['senses_scale']:
        words, numbers, what = find_senses(phrase, model, encoding)
        steps.append(scale_senses(words, numbers, factor))
        change = f'Times {factor:g}' if factor else 'Off'
        lines.append(f'{change}: {what}{absent(words, prompts)}')
    for word, old, new in edits['replace']:
        words, what = find_words(word, encoding)
        old = word_id(encoding, old)
        new = word_id(encoding, new)
        steps.append(replace_word(model, words, old, new))
        lines.append(f'Replaced: {what} gives {quoted(encoding, new)} '
                     f'what it gave {quoted(encoding, old)}{absent(words, prompts)}')
    bags = [bag_ids(encoding, words) for words in edits['topic']]
    scores = scores_of_bags(model, bags) if bags else None  # (V, k, topics)
    for i, (words, weights) in enumerate(zip(edits['topic'], edits['strength'])):
        steps.append(topic(model, scores[..., i], weights))
        factors = ', '.join(f'{weight:g}' for weight in weights)
        lines.append(f'Topic: {", ".join(words)}; senses scaled by {factors}')
    return compose(steps), lines


def load_edit(path: str | Path, model: Backpack, encoding: Encoding) -> Edit:
    """Load an edit saved by sample.py --save-edit; UserError if it does not fit the model."""
    edits = parse_edits(read_edit(path, model.config.n_vocab))
    edit, _ = make_edit(edits, model, encoding)
    return edit
