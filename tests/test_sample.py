"""Claims about sample.py on the trained toy: what it prints is what the model and its senses say."""

import copy
import json
import os
import re
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import error_of, say
from torch import Tensor

import sample
import senses
from model import Backpack
from rucksack import published
from rucksack.data import load_tokenizer
from rucksack.grammar import PROMPT, bag_of_words, make_edit, read_prompt, shown, word_id
from rucksack.published import from_pretrained
from senses import STRENGTHS, affinities, compose, edited, load_edit, replace_word, scale_senses, topic


class World:
    """A model, its words, and the prompt that it is asked about."""

    def __init__(self, source: str = 'out/toy', prompt: str = PROMPT):
        self.model = from_pretrained(source).requires_grad_(False)
        self.encoding = load_tokenizer(self.model.tokenizer)
        self.ids = read_prompt(prompt, self.encoding, self.model.config.block_size)[0]
        self.idx, self.E = torch.tensor([self.ids]), self.model.wte.weight[:self.encoding.n_vocab]
        self.id = partial(word_id, self.encoding)

    def probs(self, *edits) -> Tensor:
        """Probabilities of the next word under edits one after another: (V,)."""
        C = edited(self.model, self.idx, compose(list(edits)))
        return self.model(self.idx, C=C)[0, -1, :len(self.E)].double().softmax(-1)

    def top(self, scores: Tensor, n: int) -> list:
        """The n largest of scores (V,) as [word, score]."""
        return [[shown(self.encoding, v), scores[v].item()] for v in scores.topk(n).indices.tolist()]

    def next_words(self, *columns: Tensor) -> list:
        """The ten likeliest words of the first and of the last column, and the six that differ most, in all
        columns and in two bars."""
        ids = {v for probs in (columns[0], columns[-1]) for v in probs.topk(10).indices.tolist()}
        moved = (columns[-1] - columns[0]).abs()
        ids |= {v for v in moved.topk(6).indices.tolist() if moved[v] > 1e-4}
        return [[shown(self.encoding, v), *(p[v].item() for p in (*columns, columns[0], columns[-1]))]
                for v in sorted(ids, key=lambda v: -max(p[v].item() for p in columns))]


@pytest.fixture
def world(out) -> World:
    """The toy in out/toy, and the prompt that is asked about by default."""
    return World()


def ask(capsys, *argv: str) -> dict[str, list]:
    """The rows of the tables of a command, as --json writes them."""
    say(sample, capsys, *argv, '--json', 'tables.json', '--num-samples', '1', '--max-new-tokens', '1')
    return {name: t['rows'] for name, t in json.loads(Path('tables.json').read_text())['tables'].items()}


def same(a, b) -> bool:
    """Two tables are the same, numbers to 1e-4."""
    if isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b if isinstance(b, str) else abs(a - b) < 1e-4


def as_transformer(path: str) -> None:
    """Make a checkpoint of the toy's contextualizer alone."""
    checkpoint = torch.load('out/toy/ckpt.pt', weights_only=True)
    checkpoint['model'] = {k: v for k, v in checkpoint['model'].items() if not k.startswith('sense_')}
    checkpoint['model_config']['n_sense'] = 0
    torch.save(checkpoint, path)


def test_an_edit_shows_the_next_words_of_the_model_before_and_after(world, capsys):
    """They are those of senses edited by hand; A/B picks the sense that most separates A from B."""
    nurse, she, he = map(world.id, ('nurse', 'she', 'he'))
    best = (world.model.senses(torch.tensor(nurse)) @ (world.E[she] - world.E[he])).abs().argmax().item()
    for off, flags in (([3, 5], ['nurse:3,5']), ([3, 5], ['nurse:3', 'nurse:5']), ([], ['sheriff:0']),
                       ([3, 5], ['nurse:3', '--senses-off', 'nurse:5']), ([best], ['nurse:she/he'])):
        kept = torch.tensor([[v != nurse or l not in off for l in range(16)] for v in world.ids])  # (T, k)
        after = world.probs(lambda idx, C: C * kept[..., None])  # noqa: B023
        rows = ask(capsys, '--senses-off', *flags)['next words']
        assert same(rows, world.next_words(world.probs(), after))
    said = say(sample, capsys, '--senses-off', 'nurse:she/he', 'sheriff:0')
    assert all(re.search(rf"\n{re.escape(word)} +{x:.3f}  {y:.3f}", said) for word, x, y, *_ in rows)
    assert f'\nOff: sense {best} of nurse, which most separates' in said
    assert '\nOff: sense 0 of sheriff (not in the prompt)\n' in said


def test_an_edit_that_is_saved_is_the_same_edit(world, capsys):
    """From its file, alone or with others, it gives the lines, the tables and the text that the flags give,
    and in Python the same senses; a file that is damaged or of another vocabulary is named, and so are parts
    that do not fit."""
    flags = ['--senses-off', 'nurse:3,5', '--senses-scale', 'nurse:she/he=.5', '--replace', 'nurse: she->he',
             '--topic', 'music', 'gaming', '--strength', '3', '1,2,1,1']
    said = say(sample, capsys, *flags, '--save-edit', 'e.json')
    assert say(sample, capsys, '--edit', 'e.json') == said
    both = say(sample, capsys, *flags[:2], 'nurse:7', '--topic', 'sports', '--edit', 'e.json')
    assert both.count('Off: ') == 3 and both.count('senses times 2.2, 2.2, 1.5, 1\n') == 1
    edit = load_edit('e.json', world.model)
    want, _ = make_edit(json.loads(Path('e.json').read_text())['edits'], world.model, world.encoding)
    C = world.model.senses(world.idx)
    assert torch.equal(edit(world.idx, C), want(world.idx, C)) and not torch.equal(want(world.idx, C), C)
    whole = json.loads(Path('e.json').read_text())
    for change, why in (({'vocabulary': 7}, 'it is for 7 ids, not 811'), ({'edits': {}}, 'senses_off'),
                        ({'edits': whole['edits'] | {'x': []}}, 'other parts'),
                        ({'edits': whole['edits'] | {'replace': [3]}}, 'other parts'),
                        ({'edits': whole['edits'] | {'strength': []}}, 'other parts'),
                        ({'edits': whole['edits'] | {'replace': ['nurse: she -> yak']}}, "'yak'"),
                        ({'more': ' ' * (1 << 20)}, 'e.json: '), (None, 'e.json: ')):
        Path('e.json').write_text('[' * 99999 if change is None else json.dumps(whole | change))
        assert why in error_of(sample, capsys, '--edit', 'e.json', '--device', 'cpu')


def test_samples_are_those_of_generate(world, capsys):
    """They are drawn with the seed, up to end-of-text, before and after an edit."""
    eot, edit = world.encoding.eot_token, scale_senses(None, [1], 0.0)
    for idx, flags, titles in ((world.idx, ['--senses-off', '*:1'], {'before ': None, 'after ': edit}),
                               (torch.tensor([[eot]]), ['--start', ''], {'': None})):
        flags += ['--seed', '3', '--num-samples', '3', '--temperature', '0.7', '--top-k', '5']
        said = say(sample, capsys, *flags)
        for title, its in titles.items():
            torch.manual_seed(3)
            made = world.model.generate(idx.expand(3, -1), 60, 0.7, 5, edit=its)
            for i, row in enumerate(made.tolist(), 1):
                row = [*row, eot][row[0] == eot:]
                assert f'\n{title}{i}: {world.encoding.decode(row[:row.index(eot)])}\n' in said


def test_what_becomes_of_a_prompt_is_said(out, capsys):
    """Of one longer than block_size the last tokens are read; unknown words are named."""
    text = ' '.join(['The nurse smiled and the zebra waved.'] * 30)
    said = say(sample, capsys, '--start', text, '--max-new-tokens', '5')
    assert 'tokens; the model reads the last 64.\nThe model has never seen zebra: it reads' in said


def test_without_from_the_newest_backpack_is_taken(out, capsys, monkeypatch):
    """Without one English is; what is taken is said, and for a misspelled name what is there."""
    assert 'no such file or folder: out/tou; there is out/toy' in error_of(sample, capsys, '--from=out/tou')
    for name, time in (('old', 3e9), ('new', 4e9), ('gpt', 5e9)):
        Path('out', name).mkdir()
        as_transformer('out/gpt/ckpt.pt') if name == 'gpt' else shutil.copy('out/toy/ckpt.pt', f'out/{name}')
        os.utime(f'out/{name}/ckpt.pt', (time, time))
    about = r'Backpack {}: 2 layers of width 64, 16 senses, \d+ ids; {}\n'
    assert re.match(about.format('out/new', 'the newest in out/.*'),
                    say(sample, capsys))
    monkeypatch.setattr(published, 'ENGLISH', Path('pretrained').absolute())
    Path('out').rename('away')
    for argv in ([], ['--from', 'english']):
        assert 'pretrained is missing; train a Backpack: python prepare' in error_of(sample, capsys, *argv)
    sample.main(['--from', 'away/new', '--export', 'pretrained'])
    assert re.match(about.format('english', 'out/ has no Backpack yet'), say(sample, capsys))


def test_what_looks_has_the_scores_of_senses(world, capsys):
    """--show, --find, --similar, --weights and --sweep print what alpha, C . E and senses.* are."""
    model, E, name_of = world.model, world.E, lambda v: shown(world.encoding, v)
    nurse, quick, she, he, music, guitar = map(world.id, 'nurse quick she he music guitar'.split())
    C, tables = model.senses(torch.arange(len(E))), {'show quick': [], 'show nurse:9,3': []}  # (V, k, d)
    for name, w, chosen in (('show quick', quick, range(16)), ('show nurse:9,3', nurse, [9, 3])):
        for l in chosen:
            c = C[w, l] * (-2 if (w, l) == (nurse, 9) else 1)
            tables[name] += [[l, c.norm().item(), '+', *world.top(E @ c, 8)],
                             ['', '', '-', *([word, -x] for word, x in world.top(-E @ c, 8))]]
    apart, scores = senses.separation(model, None, she, he), affinities(model, [[music, guitar]])[0]  # (V, k)
    spread, alike = apart.abs().mean(0), senses.similarity(model, quick)  # (k,), (V, k)
    tables['find she/he'] = [
        [l, spread[l], *([name_of(w), apart[w, l]] for w in apart[:, l].abs().topk(8).indices.tolist())]
        for l in spread.argsort(descending=True).tolist()]
    best = [divmod(i, 16) for i in scores.flatten().topk(20).indices.tolist()]
    tables['find music+guitar'] = [[scores[w, l], name_of(w), l, *world.top(E @ C[w, l], 5)] for w, l in best]
    alike[quick] = -1
    tables['similar quick'] = [[str(l), *world.top(alike[:, l], 8)] for l in range(16)]
    tables['similar quick'] += [['min', *world.top(alike.amin(-1), 8)]]
    tables['sweep nurse:0-15'] = world.next_words(*(
        world.probs(scale_senses([nurse], [9], -2.0), scale_senses([nurse], list(range(16)), factor))
        for factor in (0, 0.25, 0.5, 0.75, 1)))
    found = ask(capsys, '--senses-scale', 'nurse:9=-2', '--show', 'quick', 'nurse:9,3', '--find', 'she/he',
                'music+guitar', '--similar', 'quick', '--sweep', 'nurse:0-15')
    assert found.keys() == tables.keys()
    assert [name for name in tables if not same(found[name], tables[name])] == []


@pytest.mark.parametrize('what', [['she'], ['she', 'he'], []])
def test_explain_has_terms_that_add_up(world, capsys, what):
    """The largest alpha * C . E and the rest add up to a logit, or a difference of two, as printed."""
    C = edited(world.model, world.idx, scale_senses([world.id('nurse')], [0, 1, 2, 3], 0.5))
    alpha, logits = world.model.alpha(world.idx)[0, :, -1].T, world.model(world.idx, C=C)[0, -1]
    a, *b = map(world.id, what) if what else [logits.argmax()]
    scores = C[0] @ (world.E[a] - (world.E[b[0]] if b else 0))  # (T, k)
    argv = ['--explain', *(['/'.join(what)] if what else []), '--senses-scale', 'nurse:0-3=0.5']
    *rows, rest, total = ask(capsys, *argv)['explain']
    terms, words = alpha * scores, [shown(world.encoding, v) for v in world.ids]
    largest = [divmod(i, 16) for i in terms.abs().flatten().topk(15).indices.tolist()]
    assert same(rows, [[terms[j, l], alpha[j, l], scores[j, l], words[j], j, l] for j, l in largest])
    assert abs(total[0] - logits[a] + (logits[b[0]] if b else 0)) < 1e-4
    assert abs(sum(row[0] for row in rows) + rest[0] - total[0]) < 1e-4
    said = ' '.join(say(sample, capsys, *argv).split())
    assert all(f'{x:+.3f} {y:.3f} {z:+.2f} {word} {j} {l} ' in said for x, y, z, word, j, l in rows)


def test_all_edits_add_up_in_one_command(out, capsys):
    """Senses off and scaled, replaced words and topics are one edit, and texts are written with it."""
    start = 'The MacBook is made by'
    world = World(prompt=start)
    model, eot = world.model, world.encoding.eot_token
    macbook, apple, hp, iphone, sony, verb = map(world.id, 'MacBook Apple HP iPhone Sony is'.split())
    edits = [scale_senses(None, [2], 0.0), scale_senses([verb], [3, 4, 5], 0.5),
             replace_word(model, [macbook], apple, hp), replace_word(model, [iphone], apple, sony)]
    for words, row in ((['film', 'tv', 'video'], STRENGTHS[1]), (['food', 'soup'], (3, 2, 1.5, 1))):
        edits.append(topic(model, affinities(model, [bag_of_words(world.encoding, words)])[0], row))
    argv = ['--start', start, '--temperature', '0', '--senses-off', '*:2', '--senses-scale', 'is:3-5=0.5',
            '--replace', 'MacBook: Apple -> HP', 'iPhone:Apple->Sony', '--strength', '1', '3,2,1.5,1',
            '--topic', 'film_tv_video', 'food, soup']
    assert same(ask(capsys, *argv)['next words'], world.next_words(world.probs(), world.probs(*edits)))
    made, said = model.generate(world.idx, 60, 0, edit=compose(edits))[0].tolist(), say(sample, capsys, *argv)
    assert f'\nafter 1: {world.encoding.decode(made[:[*made, eot].index(eot)])}\n' in said
    assert "what MacBook says of ' Apple' it says of ' HP'\n" in said and '\nTopic: film, tv, ' in said


def test_export_writes_what_from_reads(out, capsys):
    """--export writes a folder that --from takes for the same model, with the same words and texts."""
    assert 'exported: written\n' in say(sample, capsys, '--export', 'exported')
    one, two = (say(sample, capsys, '--from', source, '--senses-off', 'nurse:3').split('\n', 1)[1]
                for source in ('out/toy', 'exported'))
    assert one == two and 'exists' in error_of(sample, capsys, '--export', 'exported')


def test_text_in_bfloat16_differs_first_where_two_words_are_near(world, capsys, monkeypatch):
    """At temperature 0, 200 tokens; --dtype bfloat16 writes with such weights, tables stay in float32."""
    ids, half = torch.tensor([world.ids]), copy.deepcopy(world.model).bfloat16()
    a, b = (m.generate(ids, 200, temperature=0)[0] for m in (world.model, half))
    if not torch.equal(a, b):
        first = (a != b).nonzero()[0].item()
        context = a[max(0, first - world.model.config.block_size // 2):first]
        logits = world.model(context[None])[0, -1]
        assert abs(logits[a[first]] - logits[b[first]]) < 0.3
    flags = ['--senses-off', 'nurse:3', '--temperature', '0', '--num-samples', '1']
    def generate(model, *args, real=Backpack.generate, **options):
        dtypes.append(model.wte.weight.dtype)
        return real(model, *args, **options)
    dtypes = []
    monkeypatch.setattr(Backpack, 'generate', generate)
    plain, said = (say(sample, capsys, *flags, '--dtype', dtype) for dtype in ('float32', 'bfloat16'))
    assert dtypes == [torch.float32] * 2 + [torch.bfloat16] * 2  # before and after
    assert plain.split('before 1')[0] == said.split('before 1')[0] and 'before 1: When the nurse' in said


@pytest.mark.parametrize('command, message', [
    ('--senses-off nurse:3 nurse:16', 'senses 0 to 15'), ('--senses-scale nurse:10', 'FACTOR'),
    ('--replace Wii:HP->Xerox', "'Xerox'"), ('--topic music zebras', "'zebras' is no word"),
    ('--topic music --strength 4', 'neither 0, 1, 2 or 3'), ('--topic music --strength 1 2', 'goes with'),
    ('--show nurse zebra', "'zebra'"), ('--find she/', 'A/B'), ('--find she+zebra', "'zebra'"),
    ('--explain she/zebra', "'zebra'"), ('--sweep nurse', 'WORD:SENSES'), ('--edit none.json', 'none.json'),
    ('--temperature -1', 'float from 0'), ('--num-samples two', "'two'"), ('--frobnicate', '--help'),
    ('--device abacus', 'device abacus cannot be used'), ('--json x.json', '--json goes with'),
    ('--show nurse --json x.pt', '.json'), ('--export out', 'exists'), ('--export x --topic music', 'no ed'),
    ('--html none/x.html', 'in a folder that exists'), ('--html out/toy/ckpt.pt', 'ends in .html'),
    ('--html x.html --senses-off nurse:1', 'goes without'), ('--save-edit x.json', 'goes with edits'),
    ('--senses-off nurse:1 --save-edit x.pt', 'ends in .json'),
    *((f'--from gpt.pt {flag}', 'gpt.pt is a Transformer and has no senses') for flag in (
        '--senses-off nurse:1', '--senses-scale nurse:1=2', '--replace nurse:she->he', '--topic music',
        '--show nurse', '--find she/he', '--similar nurse', '--explain', '--sweep nurse:1'))])
def test_a_bad_command_is_one_line(command, message, out, capsys):
    """Exit code 2, and no half of an answer; a Transformer, which has no senses, writes text alone."""
    as_transformer('gpt.pt')
    assert message in error_of(sample, capsys, *command.split(), printed=1)
    assert sorted(path.name for path in Path().iterdir()) == ['gpt.pt', 'out']
    assert 'Transformer gpt.pt: ' in say(sample, capsys, '--from', 'gpt.pt', '--max-new-tokens', '1')
