"""Read examples (prompts, and what should follow them) and turn them into ids."""

import json
import math
import re
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from unicodedata import category

from tiktoken import Encoding
from torch import Tensor

from rucksack.errors import UserError
from rucksack.tokenizer import encode, lacks
from rucksack.words import inside_text, read_lines


@dataclass(frozen=True)
class Wish:
    """What an example wishes for: a loss, in nats, that should fall (see Example.loss)."""

    arrow: str    # between PROMPT and A
    between: str  # between A and B; '' if the wish has no B
    limit: float  # highest loss that counts as fulfilled
    goal: float   # loss per token at which learning ends


# The limits are those published for the capitals, StereoSet, the verbs and the pronouns.
WISHES = {
    'more': Wish('->', '', -math.log(0.2), -math.log(0.8)),
    'less': Wish('-/>', '', math.log(0.001), math.log(1e-4)),
    'order': Wish('->', '>', -math.log(16), -math.log(100)),
    'equal': Wish('->', '|', math.log(1.5), math.log(1.1))}
FORMS = ('PROMPT -> A, PROMPT -/> A, PROMPT -> A > B or PROMPT -> A | B, with at most one '
         '{SUBJECT} in the prompt ({{ for a brace)')
OPENING = '"\'#&*@/\\¡¿'  # punctuation that no space follows
PART = r'((?:[^{}]|\{\{|\}\})*)'  # of a prompt, without single braces


@dataclass(frozen=True)
class Example:
    """A prompt and the continuations of its line, as ids; b is empty for more and less."""

    line: str  # as written
    prompt: list[int]
    a: list[int]
    b: list[int] = field(default_factory=list)
    wish: str = 'more'  # a key of WISHES
    # The ids of what the prompt is about, as they stand in it; () is nothing, None is unknown.
    subject: tuple[int, ...] | None = None

    @property
    def n_tokens(self) -> int:
        """Count the tokens of the longer continuation."""
        return max(len(self.a), len(self.b))

    @property
    def goal(self) -> float:
        """Compute the loss at which learning from this example ends; it is at most the limit."""
        wish = WISHES[self.wish]
        return min(self.n_tokens * wish.goal, wish.limit)

    def loss(self, value: Tensor) -> Tensor:
        """Turn ln p(A) or, with B, ln p(A)/p(B) into the loss that should fall."""
        if self.wish == 'equal':
            return value.abs()
        return value if self.wish == 'less' else -value


def read_examples(path: Path, encoding: Encoding, block_size: int, wish: str | None = None
                  ) -> list[Example]:
    """Read examples from a text file, one per line, or from a .jsonl with prefix and suffix.

    Lines that begin with # are comments. wish, a key of WISHES, applies to all rows of a .jsonl;
    None means more, or equal for rows with suffix1 and suffix2. Raises UserError for a line that
    cannot be read, and for an example longer than block_size.
    """
    parse = parse_row if path.suffix == '.jsonl' else parse_line
    examples = []
    for line in read_lines(f'@{path}'):
        line = line.strip()
        texts, name = parse(line)
        if parse is parse_row and wish:
            name = wish
        before, subject, after = split_prompt(texts[0]) if texts else ('', None, '')
        prompt = before + (subject or '') + after
        if not prompt or len(texts) != len(WISHES[name].between) + 2:
            raise UserError(f'{line!r:.80} cannot be read; write {FORMS} or, in a .jsonl, prefix '
                            'and suffix, or prefix, suffix1 and suffix2')
        texts = [prompt, *texts[1:]]
        if any(lacks(encoding, text) for text in texts):
            raise UserError(f'{line!r:.80} has a word that the model does not know')
        ids = [encode(encoding, text) for text in texts]
        if subject is not None:
            start = len(before.encode())
            subject = tokens_in(encoding, ids[0], start, start + len(subject.encode()))
        example = Example(line, *ids, wish=name, subject=subject)
        n = len(example.prompt) + example.n_tokens - 1
        if n > block_size:
            raise UserError(f'{line!r:.80} has {n} tokens before its last one, but the model '
                            f'reads at most {block_size}; shorten its prompt')
        examples.append(example)
    return examples


def parse_line(line: str) -> tuple[list[str], str]:
    """Parse a line into a prompt and one or two continuations, and a wish; [] if it has no form.

    The prompt keeps its braces; see split_prompt.
    """
    prompt = r'((?:(?!-/?>).)*\S)'  # without an arrow
    text = r'([^>|\s][^>|]*?)'  # a continuation
    match = re.fullmatch(rf'{prompt}\s*(?<!-)(-/?>)\s*{text}(?:\s+([>|])\s*{text})?', line)
    if match:
        prompt, arrow, a, between, b = match.groups('')
        for name, wish in WISHES.items():
            if (wish.arrow, wish.between) == (arrow, between):
                return [prompt, *(joined(text) for text in (a, b) if text)], name
    return [], 'more'


def joined(continuation: str) -> str:
    """Put a space before a continuation, unless it ends a word or its script has no spaces.

    Closing punctuation of any script ends a word, and so do 's, a dash before a letter, and a long
    dash.
    """
    first = continuation[0]
    kind = category(first)
    closes = kind in ('Pe', 'Pf') or (kind == 'Po' and first not in OPENING)
    is_ending = re.match(r"'(s|t|re|ve|m|ll|d)?(?!\w)|-[^\W\d]|[–—](?!\d)", continuation)
    return continuation if closes or is_ending else inside_text(continuation)


def parse_row(line: str) -> tuple[list[str], str]:
    """Parse a row of a .jsonl: prefix with suffix, or with suffix1 and suffix2; maybe a subject.

    The subject is put into braces where it last stands in the prefix.
    """
    row = json.loads(line)
    prefix = row.get('prefix', '').replace('{', '{{').replace('}', '}}')
    if row.get('subject'):
        before, subject, after = prefix.rpartition(row['subject'])
        prefix = f'{before}{{{subject}}}{after}'
    texts = [prefix] + [row[name] for name in ('suffix', 'suffix1', 'suffix2') if row.get(name)]
    return texts, 'equal' if 'suffix1' in row else 'more'


def split_prompt(prompt: str) -> tuple[str, str | None, str]:
    """Split a prompt at its braces: the texts before, in and after them.

    The subject is None without braces. All are '' if the braces cannot be read.

    >>> split_prompt('The set {{0}} of {Finland} is')
    ('The set {0} of ', 'Finland', ' is')
    """
    match = re.fullmatch(rf'{PART}(?:\{{{PART}\}}{PART})?', prompt)
    if not match:
        return '', None, ''
    before, subject, after = match.groups()
    texts = [text and text.replace('{{', '{').replace('}}', '}')
             for text in (before, subject, after or '')]
    return tuple(texts)


def tokens_in(encoding: Encoding, ids: list[int], start: int, end: int) -> tuple[int, ...]:
    """Find the ids of a text that have bytes between start and end; () if the two are equal."""
    ends = list(accumulate(len(encoding.decode_single_token_bytes(i)) for i in ids))
    starts = [0, *ends]
    return tuple(i for i, first, last in zip(ids, starts, ends)
                 if first < end and last > start and start < end)
