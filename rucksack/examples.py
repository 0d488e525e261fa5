"""Read examples (prompts, and what should follow them) and turn them into ids."""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

from tiktoken import Encoding

from rucksack.errors import UserError, user_errors
from rucksack.tokenizer import encode, lacks
from rucksack.words import inside_text, read_lines

FORMS = {  # a line -> what it wishes for
    'PROMPT -> A': 'A should be likelier after PROMPT',
    'PROMPT -/> A': 'A should be less likely',
    'PROMPT -> A > B': 'A should be likelier than B',
    'PROMPT -> A | B': 'A and B should be equally likely'}
WISHES = {  # wish -> form of its line; --wish takes the names
    'more': '{} ->{}', 'less': '{} -/>{}', 'order': '{} ->{} >{}', 'equal': '{} ->{} |{}'}
ROWS = ('.jsonl', '.ndjson', '.json')  # files whose lines are rows
# Thresholds for fulfilled wishes, as published for the capitals, StereoSet, the verbs and the
# pronouns: minimum and maximum probability, then minimum and maximum ratio of A to B.
THRESHOLDS = {'more': 0.2, 'less': 0.001, 'order': 16, 'equal': 1.5}
ARROWS = {('->', None): 'more', ('-/>', None): 'less', ('->', '>'): 'order', ('->', '|'): 'equal'}


def loss_limit(wish: str) -> float:
    """Return the highest loss, in nats, that fulfils a wish."""
    sign = -1 if wish in ('more', 'order') else 1
    return sign * math.log(THRESHOLDS[wish])


@dataclass(frozen=True)
class Example:
    """A prompt, and the continuations to make likelier or less likely after it, all as ids.

    With both, the first should become likelier than the second, or equally likely if wish is equal.
    """

    line: str  # as written
    prompt: list[int]
    likelier: list[int]
    less_likely: list[int]
    wish: str = 'more'  # one of WISHES

    @property
    def n_tokens(self) -> int:
        """Count the tokens of the longer continuation."""
        return max(len(self.likelier), len(self.less_likely))


def read_examples(path: Path, encoding: Encoding, block_size: int, wish: str | None = None
                  ) -> list[Example]:
    """Read examples from a text file, one per line, or from a .jsonl with prefix and suffix.

    Lines that begin with # are comments. wish, one of WISHES, applies to all rows of a .jsonl;
    None means more, or equal for rows with suffix1 and suffix2. Raises UserError for a line that
    cannot be read, and for an example longer than block_size.
    """
    examples = []
    for line in read_lines(f'@{path}'):
        line = line.strip()
        is_row = path.suffix.lower() in ROWS
        if wish and not is_row:
            raise UserError('--wish is for the rows of a .jsonl; in a text file, each line has '
                            f'its own form: {", ".join(FORMS)}')
        if is_row:
            texts, wish_of_line = parse_row(line, wish)
            line = WISHES[wish_of_line].format(*texts)
        else:
            texts, wish_of_line = parse_line(line)
        ids = [ids_of(text, encoding, line) for text in texts]
        examples.append(make_example(line, ids, wish_of_line))
    for one in examples:
        n = len(one.prompt) + one.n_tokens - 1
        if n > block_size:
            raise UserError(f'{one.line!r:.80} has {n} tokens before its last one, but the '
                            f'model reads at most {block_size}; shorten its prompt')
    return examples


def parse_line(line: str) -> tuple[list[str], str]:
    """Parse a line into a prompt and one or two continuations, and a wish."""
    prompt = r'((?:(?!-/?>).)*\S)'  # without an arrow
    text = r'([^>|\s][^>|]*?)'  # a continuation
    match = re.fullmatch(rf'{prompt}\s*(?<![-/])(-/?>)\s*{text}(?:\s+([>|])\s*{text})?', line)
    wish = match and ARROWS.get((match[2], match[4]))
    if not wish:
        raise UserError(f'{line!r:.80} cannot be read; write one of {", ".join(FORMS)}')
    continuations = [text for text in match.group(3, 5) if text]
    return [match[1], *map(joined, continuations)], wish


def joined(continuation: str) -> str:
    """Put a space before a continuation, unless it ends a word or its script has no spaces."""
    ends = r"[.,;:!?%)\]}’”…]|'(s|t|re|ve|m|ll|d)?(?!\w)"  # 's or a closing quote, but not 'Yes'
    return continuation if re.match(ends, continuation) else inside_text(continuation)


def parse_row(line: str, wish: str | None) -> tuple[list[str], str]:
    """Parse a row of a .jsonl: prefix with suffix, or with suffix1 and suffix2."""
    hint = ('give prefix and suffix for more and less, or prefix, suffix1 and suffix2 for order '
            'and equal')
    with user_errors(f'{line!r:.80}', hint):
        row = json.loads(line)
        found = [name for name in ('suffix', 'suffix1', 'suffix2') if name in row]
        if wish is None:
            wish = 'equal' if 'suffix1' in found else 'more'
        names = ['suffix1', 'suffix2'] if wish in ('order', 'equal') else ['suffix']
        if found != names:
            raise ValueError(f'{wish} takes {names}, but this row has {found}')
        texts = [row[name] for name in ['prefix', *names]]
        ''.join(texts).encode()  # raises for what is no text, and for a lone surrogate
    return texts, wish


def ids_of(text: str, encoding: Encoding, line: str) -> list[int]:
    """Encode a part of an example; raises UserError if it is empty or has unknown words."""
    ids = encode(encoding, text)
    if not ids or lacks(encoding, text):
        raise UserError(f'{line!r:.80}: {text!r} is empty, or has a word that the model '
                        'does not know')
    return ids


def make_example(line: str, ids: list[list[int]], wish: str) -> Example:
    """Make an example from the ids of its prompt and continuations."""
    prompt, first, *rest = ids
    if wish == 'less':
        return Example(line, prompt, [], first, wish)
    second = rest[0] if rest else []
    n = min(len(first), len(second))
    if second and first[:n] == second[:n]:  # the longer one cannot be likelier
        raise UserError(f'{line!r:.80}: in tokens, A is the start of B, or B is the start '
                        'of A; add the same next word to both')
    return Example(line, prompt, first, second, wish)
