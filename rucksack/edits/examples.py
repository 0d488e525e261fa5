"""Read examples (prompts, and what should follow them) and turn them into ids."""

import json
import math
import re
from dataclasses import dataclass, field
from itertools import compress
from unicodedata import category

from torch import Tensor

from rucksack.errors import UserError, user_errors
from rucksack.loaded import LoadedModel
from rucksack.tokenizer import lacks
from rucksack.words import inside_text, read_lines, tokens_with_zeros


@dataclass(frozen=True)
class Wish:
    """What an example wishes for: a loss, in nats, that should fall (see Example.loss)."""

    arrow: str    # between PROMPT and A
    between: str  # between A and B; '' if the wish has no B
    limit: float  # highest loss that counts as fulfilled
    goal: float   # loss per token at which learning ends


# The limits are those published for the capitals, StereoSet, the verbs and the pronouns.
WISHES = {
    'more': Wish('->', '', -math.log(0.2), -math.log(0.65)),
    'less': Wish('-/>', '', math.log(0.001), math.log(1e-4)),
    'order': Wish('->', '>', -math.log(16), -math.log(100)),
    'equal': Wish('->', '|', math.log(1.5), math.log(1.1))}
FORMS = ('PROMPT -> A, PROMPT -/> A, PROMPT -> A > B or PROMPT -> A | B, with at most one '
         '{SUBJECT} in the prompt ({{ for a brace); in a .jsonl, prefix with suffix, or with '
         'suffix1 and suffix2')
OPENING = '"\'#&*@/\\¡¿'  # punctuation that no space follows
BRACE = re.compile(r'(?<!\{)\{(?!\{)|(?<!\})\}(?!\})')  # a single one


@dataclass(frozen=True)
class Example:
    """A prompt and the continuations of its line, as ids; b is empty for more and less.

    Or a neighbour (see neighbours.py): a prompt after which A should not become likelier.
    """

    line: str  # as written; of a neighbour, its prompt in quotes
    prompt: list[int]
    a: list[int]
    b: list[int] = field(default_factory=list)
    wish: str = 'more'  # a key of WISHES
    # The ids of what the prompt is about, as they stand in it; () is nothing, None is unknown.
    subject: tuple[int, ...] | None = None
    measure: str = 'efficacy'  # of model editing: what this example counts for
    kind: str = ''  # of a neighbour

    @property
    def texts(self) -> list[tuple[list[int], list[int]]]:
        """List the prompt with A and, if there is one, the prompt with B, as pairs of ids."""
        return [(self.prompt, ids) for ids in (self.a, self.b) if ids]

    @property
    def limit(self) -> float:
        """Give the highest loss that fulfils the wish."""
        return WISHES[self.wish].limit

    @property
    def goal(self) -> float:
        """Compute the loss at which learning from this example ends; it is at most the limit."""
        n = max(len(self.a), len(self.b))
        return min(n * WISHES[self.wish].goal, self.limit)

    def loss(self, value: Tensor) -> Tensor:
        """Turn ln p(A) or, with B, ln p(A)/p(B) into the loss that should fall."""
        if self.wish == 'equal':
            return value.abs()
        return value if self.wish == 'less' else -value

    def is_fulfilled(self, value: Tensor) -> bool:
        """Tell whether the wish is fulfilled, given ln p(A) or ln p(A)/p(B)."""
        return self.loss(value).item() <= self.limit


def read_examples(path: str | None, loaded: LoadedModel) -> list[Example]:
    """Read examples from a text file, one per line, or from a .jsonl with prefix and suffix.

    Lines that begin with # are comments. Raises UserError for a line that cannot be read, for an
    example longer than the model's block_size, and if path is None.
    """
    if path is None:
        raise UserError('examples needs --data FILE, with one example per line or a .jsonl')
    parse = parse_row if path.endswith('.jsonl') else parse_line
    examples = []
    for line in read_lines(f'@{path}'):
        line = line.strip()
        with user_errors(f'{line!r:.80}', f'write {FORMS}'):
            examples.append(make_example(line, *parse(line), loaded))
    return examples


def make_example(line: str, prompt: list[str], continuations: list[str], wish: str,
                 loaded: LoadedModel) -> Example:
    """Encode the prompt, split around its subject if that is marked, and the continuations."""
    texts = [''.join(prompt), *continuations]
    n_texts = len(WISHES[wish].between) + 2
    if len(texts) != n_texts or not texts[0]:
        raise UserError(f'write {FORMS}')
    if any(lacks(loaded.encoding, text) for text in texts):
        raise UserError('the model does not know one of these words')
    ids, *rest = [loaded.encode(text) for text in texts]
    loaded.needs_length(len(ids) + max(map(len, rest)) - 1, 'this example has')
    subject = None
    if len(prompt) > 1:
        before, marked, after = prompt
        zeros = '\0' * len(marked.encode())
        is_subject = tokens_with_zeros(loaded.encoding, ids, before + zeros + after)
        subject = tuple(compress(ids, is_subject))
    return Example(line, ids, *rest, wish=wish, subject=subject)


def parse_line(line: str) -> tuple[list[str], list[str], str]:
    """Parse a line into its prompt, one or two continuations, and a wish.

    A prompt with a subject in braces is split into what stands before, in and after them.
    """
    if re.fullmatch('"[^"]*"', line):  # as the echo of Windows writes it
        raise UserError('its quotes would be learned; leave them out')
    prompt = r'((?:(?!-/?>).)*\S)'  # without an arrow
    text = r'([^>|\s][^>|]*?)'  # a continuation
    match = re.fullmatch(rf'{prompt}\s*(?<!-)(-/?>)\s*{text}(?:\s+([>|])\s*{text})?', line)
    if match:
        prompt, arrow, a, between, b = match.groups('')
        prompt = re.sub(r'\s*(\{?)\s*\}$', r'\1}', prompt)  # no space may end the text
        pieces = [
            piece.replace('{{', '{').replace('}}', '}')
            for piece in BRACE.split(prompt)]
        for name, wish in WISHES.items():
            if (wish.arrow, wish.between) == (arrow, between):
                return pieces, [joined(text) for text in (a, b) if text], name
    raise UserError(f'write {FORMS}')


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


def parse_row(line: str) -> tuple[list[str], list[str], str]:
    """Parse a row of a .jsonl as parse_line does: prefix, suffix or suffix1 and suffix2.

    It may have a wish, and a subject, which is where it last stands in the prefix.
    """
    row = json.loads(line)
    prompt = [row['prefix']]
    if row.get('subject'):
        prompt = row['prefix'].rpartition(row['subject'])
        if not prompt[1]:
            raise UserError('its subject does not stand in its prefix')
    texts = [
        row[name]
        for name in ('suffix', 'suffix1', 'suffix2')
        if row.get(name)]
    usual = 'equal' if 'suffix1' in row else 'more'
    return prompt, texts, row.get('wish', usual)
