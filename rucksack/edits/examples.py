"""Read examples (prompts, and what should follow them) and turn them into ids."""

import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path

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
    'more': Wish('->', '', -math.log(0.2), math.log(2)),
    'less': Wish('-/>', '', math.log(0.001), math.log(1e-4)),
    'order': Wish('->', '>', -math.log(16), -math.log(100)),
    'equal': Wish('->', '|', math.log(1.5), math.log(1.1))}
FORMS = 'PROMPT -> A, PROMPT -/> A, PROMPT -> A > B or PROMPT -> A | B'


@dataclass(frozen=True)
class Example:
    """A prompt and the continuations of its line, as ids; b is empty for more and less."""

    line: str  # as written
    prompt: list[int]
    a: list[int]
    b: list[int] = field(default_factory=list)
    wish: str = 'more'  # a key of WISHES

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
    examples = []
    for line in read_lines(f'@{path}'):
        line = line.strip()
        if path.suffix == '.jsonl':
            texts, name = parse_row(line, wish)
        else:
            texts, name = parse_line(line)
        if len(texts) != len(WISHES[name].between) + 2:
            raise UserError(f'{line!r:.80} cannot be read; write {FORMS} or, in a .jsonl, prefix '
                            'and suffix, or prefix, suffix1 and suffix2')
        if any(lacks(encoding, text) for text in texts):
            raise UserError(f'{line!r:.80} has a word that the model does not know')
        ids = [encode(encoding, text) for text in texts]
        example = Example(line, *ids, wish=name)
        n = len(example.prompt) + example.n_tokens - 1
        if n > block_size:
            raise UserError(f'{line!r:.80} has {n} tokens before its last one, but the model '
                            f'reads at most {block_size}; shorten its prompt')
        examples.append(example)
    return examples


def parse_line(line: str) -> tuple[list[str], str]:
    """Parse a line into a prompt and one or two continuations, and a wish; [] if it has no form."""
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
    """Put a space before a continuation, unless it ends a word or its script has no spaces."""
    ends = r"[.,;:!?%)\]}’”…]|'(s|t|re|ve|m|ll|d)?(?!\w)"  # 's or a closing quote, but not 'Yes'
    return continuation if re.match(ends, continuation) else inside_text(continuation)


def parse_row(line: str, wish: str | None) -> tuple[list[str], str]:
    """Parse a row of a .jsonl: prefix with suffix, or with suffix1 and suffix2."""
    row = json.loads(line)
    texts = [row[name] for name in ('prefix', 'suffix', 'suffix1', 'suffix2') if row.get(name)]
    return texts, wish or ('equal' if 'suffix1' in row else 'more')
