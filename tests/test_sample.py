"""Claims about sample.py on the trained toy: what it prints is what the model and senses.* say."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, error_of, say
from torch import Tensor

import sample
import senses
from model import from_pretrained
from rucksack.data import load_tokenizer
from rucksack.grammar import PROMPT, bag_of_words, read_prompt, shown, word_id


class World:
    """A model, its words, and the prompt that it is asked about."""

    def __init__(self, source: str = 'out/toy', prompt: str = PROMPT):
        self.model = from_pretrained(source)
        self.encoding = load_tokenizer(self.model.tokenizer)
        self.ids = read_prompt(prompt, self.encoding, self.model.config.block_size)[0]
        self.idx, self.E = torch.tensor([self.ids]), self.model.wte.weight.detach()
        self.named = {shown(self.encoding, v): v for v in range(self.encoding.n_vocab)}

    def id(self, word: str) -> int:
        """The id of a word inside a text."""
        return word_id(self.encoding, word)

    def C(self, word: str) -> Tensor:
        """The senses of a word: (k, d)."""
        return self.model.senses(torch.tensor(self.id(word))).detach()

    @torch.no_grad()
    def probs(self, *edits) -> Tensor:
        """Probabilities of the next word under edits one after another: (V,)."""
        C = senses.edited(self.model, self.idx, senses.compose(list(edits)))
        return self.model(self.idx, C=C)[0, -1, :self.model.config.n_vocab].double().softmax(-1)


@pytest.fixture
def world(out) -> World:
    """The toy in out/toy, and the prompt that is asked about by default."""
    return World()


def ask(capsys, *argv: str) -> dict[str, list[dict]]:
    """The tables of a command, as --json writes them: name -> rows, column -> value."""
    say(sample, capsys, *argv, '--json', 'tables.json', '--num-samples', '1')
    tables = json.loads(Path('tables.json').read_text())['tables']
    return {name: [dict(zip(t['columns'], row)) for row in t['rows']] for name, t in tables.items()}


def check_next_words(world: World, rows: list[dict], columns: dict[str, Tensor]) -> None:
    """The table has the ten likeliest words of the first and the last column, and all probabilities."""
    ids, (first, *_, last) = [world.named[row['next word']] for row in rows], columns.values()
    assert set(ids) == set(first.topk(10).indices.tolist() + last.topk(10).indices.tolist())
    for name, probs in columns.items():
        assert [row[name] for row in rows] == pytest.approx(probs[ids].tolist(), abs=1e-6)


def check_pairs(row: dict, scores: Tensor, world: World, without: int | None = None) -> None:
    """The [word, score] of a row are the largest of scores (V,), largest first."""
    kept = [v for v in scores.argsort(descending=True).tolist() if v != without]
    pairs = [pair for name, pair in row.items() if name.isdigit()]
    assert [x for _, x in pairs] == pytest.approx(scores[kept[:len(pairs)]].tolist(), abs=1e-4) and pairs
    assert all(abs(scores[world.named[word]] - x) < 1e-4 for word, x in pairs if not word.endswith("…'"))


# -----------------------------------------------------------------------------
# Text, and its next word before and after an edit.


def test_an_edit_shows_the_next_words_of_the_model_before_and_after(world, capsys):
    """The table has the ten likeliest words of both, with the model's probabilities, its senses edited by
    hand; flags take several values and repeat; an edit of a word that is not there changes nothing."""
    def by_hand(idx, C):
        here, C = (idx[0] == world.id('nurse')).nonzero(), C.clone()
        C[0, here, [3, 5]] = 0
        return C
    rows = ask(capsys, '--senses-off', 'nurse:3', 'nurse:5')['next words']
    check_next_words(world, rows, {'before': world.probs(), 'after': world.probs(by_hand)})
    for again in (['nurse:3,5'], ['nurse:3', '--senses-off', 'nurse:5', 'sheriff:0']):
        assert ask(capsys, '--senses-off', *again)['next words'] == rows
    assert 'Off: sense 0 of sheriff (not a word of the prompt)\n' in say(sample, capsys, '--senses-off', 'sheriff:0')


def test_a_pair_of_words_picks_the_sense_that_most_separates_them(world, capsys):
    """nurse:she/he turns off argmax |C(nurse)_l . (E_she - E_he)|, says which, and the log odds of she to he
    lose what it added."""
    she, he = world.id('she'), world.id('he')
    scores = world.C('nurse') @ (world.E[she] - world.E[he])
    best = scores.abs().argmax().item()
    assert f'Off: sense {best} of nurse, which most' in say(sample, capsys, '--senses-off', 'nurse:she/he')
    rows = ask(capsys, '--senses-off', 'nurse:she/he', '--explain', 'she/he')['explain']
    assert all(row['adds'] == 0 for row in rows if (row['token'], row['sense']) == ("' nurse'", best))
    after = world.probs(senses.scale_senses([world.id('nurse')], [best], 0)).log()
    assert rows[-1]['adds'] == pytest.approx((after[she] - after[he]).item(), abs=1e-4)


def test_samples_are_those_of_generate(world, capsys):
    """Each text is the one that model.generate draws with the seed, up to its end-of-text; an empty prompt
    is the end-of-text; with edits there are texts without them and with them."""
    eot, off = world.encoding.eot_token, senses.scale_senses(None, [1], 0.0)
    for idx, flags, titles in ((world.idx, [], ['']), (torch.tensor([[eot]]), ['--start', ''], ['']),
                               (world.idx, ['--senses-off', '*:1'], ['before ', 'after '])):
        said = say(sample, capsys, '--seed', '3', '--num-samples', '3', '--temperature', '0.7', '--top-k', '5', *flags)
        for title in titles:
            torch.manual_seed(3)
            made = world.model.generate(idx.expand(3, -1), 60, 0.7, 5, edit=off if title == 'after ' else None)
            for i, row in enumerate(made.tolist(), 1):
                row = row[idx[0, 0] == eot:]
                text = world.encoding.decode(row[:row.index(eot)] if eot in row else row)
                assert f'\n{title}{i}: {text}\n' in said


def test_what_becomes_of_a_prompt_is_said(out, capsys):
    """Of a prompt longer than block_size the last block_size tokens are read, from a file too; words that the
    toy has never seen are named."""
    Path('p.txt').write_text(' '.join(['The nurse smiled and the zebra waved.'] * 30))
    said = say(sample, capsys, '--start', 'FILE:p.txt', '--max-new-tokens', '5')
    assert 'tokens; the model reads the last 64.\nThe model has never seen zebra: it reads' in said


def test_without_from_the_newest_backpack_is_taken(out, capsys):
    """The newest checkpoint in out/ that is a Backpack is used and named; without one the error names the
    command that makes one, and a name misspelled what is there."""
    assert say(sample, capsys).startswith('Backpack out/toy: 2 layers of width 64, 16 senses, ')
    assert 'no such file or folder: out/tou; there is out/toy\n' in error_of(sample, capsys, '--from', 'out/tou')
    for name, days in (('old', 2), ('new', 1), ('gpt', 0)):
        shutil.copytree('out/toy', f'out/{name}')
        os.utime(f'out/{name}/ckpt.pt', (days * -86400 + 4e9,) * 2)
    as_transformer('out/gpt/ckpt.pt')
    assert say(sample, capsys).startswith('Backpack out/new: ')
    shutil.rmtree('out/new')
    Path('out').rename('away')
    assert 'python train.py config/train_toy.py' in error_of(sample, capsys)


def as_transformer(path: str) -> None:
    """Make a checkpoint of the toy one of its contextualizer alone."""
    checkpoint, times = torch.load('out/toy/ckpt.pt', weights_only=True), os.path.exists(path) and os.stat(path)
    checkpoint['model'] = {k: v for k, v in checkpoint['model'].items() if not k.startswith('sense_')}
    checkpoint['model_config']['n_sense'] = 0
    torch.save(checkpoint, path)
    if times:
        os.utime(path, (times.st_atime, times.st_mtime))


# -----------------------------------------------------------------------------
# Look and explain.


def test_show_has_the_highest_and_lowest_words_of_each_sense(world, capsys):
    """A row + and a row - for each sense of each word, or for those that are named, with the scores C . E and
    the norm, as edits leave them."""
    tables = ask(capsys, '--show', 'quickly', 'nurse:9,3', '--senses-off', 'nurse:3')
    for name, word, chosen in (('show quickly', 'quickly', range(16)), ('show nurse:9,3', 'nurse', [9, 3])):
        up, down = tables[name][::2], tables[name][1::2]
        assert [row['sense'] for row in up] == list(chosen)
        for l, high, low in zip(chosen, up, down):
            C = world.C(word)[l] * ((word, l) != ('nurse', 3))
            scores = world.model.project(C)[:world.model.config.n_vocab].detach()
            check_pairs(high, scores, world)
            check_pairs({k: (x[0], -x[1]) for k, x in low.items() if k.isdigit()}, -scores, world)
            assert (high[''], low['']) == ('+', '-') and high['norm'] == pytest.approx(C.norm().item())


def test_find_and_similar_rank_by_the_scores_of_senses(world, capsys):
    """--find A/B ranks senses by how far they separate A from B, over one word or the mean over all; A+B
    pairs of word and sense by affinity; --similar has the neighbours of a word in each sense and in all."""
    model, (she, he, quick) = world.model, map(world.id, ('she', 'he', 'quick'))
    rows = ask(capsys, '--find', 'she/he', '--word', 'quick')['find she/he']
    scores = senses.separation(model, quick, she, he)
    assert [row['sense'] for row in rows] == scores.abs().argsort(descending=True).tolist()
    assert [row['logits'] for row in rows] == pytest.approx([scores[row['sense']].item() for row in rows])
    tables = ask(capsys, '--find', 'she/he', 'music+guitar', '--similar', 'quick')
    scores = senses.separation(model, None, she, he)  # (V, k)
    spread = scores.abs().mean(0)
    assert [row['sense'] for row in tables['find she/he']] == spread.argsort(descending=True).tolist()
    for row in tables['find she/he']:
        its, l = scores[:, row['sense']], row['sense']
        assert row['mean'] == pytest.approx(spread[l].item())
        check_pairs({k: (x[0], abs(x[1])) for k, x in row.items() if k.isdigit()}, its.abs(), world)
    scores, rows = senses.affinity(model, bag_of_words(world.encoding, ['music', 'guitar'])), tables['find music+guitar']
    assert [row['score'] for row in rows] == pytest.approx(scores.flatten().topk(20).values.tolist())
    for row in rows:
        v, l = world.named[row['word']], row['sense']
        assert row['score'] == pytest.approx(scores[v, l].item())
        check_pairs(row, model.project(model.senses(torch.tensor(v))[l])[:model.config.n_vocab].detach(), world)
    scores, rows = senses.similarity(model, quick), tables['similar quick']
    assert [row['sense'] for row in rows] == [*map(str, range(16)), 'min']
    for row, its in zip(rows, [*scores.T, scores.amin(-1)]):
        check_pairs(row, its, world, without=quick)


@pytest.mark.parametrize('what', ['she', 'she/he', None])
def test_explain_has_terms_that_add_up(world, capsys, what):
    """The terms, the rest and the total of --explain add up to the logit (or the difference of two) of the
    edited model; each is its alpha times its C . E, as senses.explain has them; the largest come first."""
    argv = ['--explain', *([what] if what else []), '--senses-scale', 'nurse:0-3=0.5']
    edit = senses.scale_senses([world.id('nurse')], [0, 1, 2, 3], 0.5)
    C, probs = senses.edited(world.model, world.idx, edit), world.probs(edit)
    ids = [world.id(word) for word in what.split('/')] if what else [probs.argmax().item()]
    v = world.E[ids[0]] - (world.E[ids[1]] if len(ids) > 1 else 0)
    alpha, scores = (t[0] for t in senses.explain(world.model, world.idx, v, C))
    *rows, rest, total = ask(capsys, *argv)['explain']
    for row in rows:
        j, l = row['position'], row['sense']
        assert row['token'] == shown(world.encoding, world.ids[j])
        assert (row['= alpha'], row['* C.E']) == (alpha[j, l].item(), scores[j, l].item())
        assert row['adds'] == pytest.approx(row['= alpha'] * row['* C.E'])
    sizes = [abs(row['adds']) for row in rows]
    assert sizes == (alpha * scores).abs().flatten().sort(descending=True).values[:15].tolist()
    assert sum(row['adds'] for row in rows) + rest['adds'] == pytest.approx(total['adds'], abs=1e-4)
    logits = world.model(world.idx, C=C)[0, -1]
    assert total['adds'] == pytest.approx((logits[ids[0]] - (logits[ids[1]] if len(ids) > 1 else 0)).item(), abs=1e-4)


def test_weights_are_those_of_the_last_position(world, capsys):
    """A row a token of the prompt, with alpha in a column a sense, or their mean."""
    alpha = world.model.alpha(world.idx)[0, :, -1].detach()  # (k, T)
    for which, columns in ((['--weights'], dict(enumerate(alpha))), (['--weights', 'mean'], {'mean': alpha.mean(0)})):
        rows = ask(capsys, *which)['weights']
        assert [row['token'] for row in rows] == [shown(world.encoding, v) for v in world.ids]
        for name, column in columns.items():
            assert [row[str(name)] for row in rows] == column.tolist()


def test_sweep_goes_from_off_to_unchanged(world, capsys):
    """--sweep has the probabilities at weights 0, 0.25, 0.5, 0.75 and 1, on top of the edits."""
    nurse, room = [world.id('nurse')], senses.scale_senses([world.id('room')], [2], 0.0)
    columns = {f'{f:g}': world.probs(room, senses.scale_senses(nurse, list(range(16)), f))
               for f in (0, 0.25, 0.5, 0.75, 1)}
    rows = ask(capsys, '--sweep', 'nurse:0-15', '--senses-off', 'room:2')['sweep nurse:0-15']
    check_next_words(world, rows, columns)


def test_json_holds_the_numbers_that_are_printed(out, capsys):
    """The file of --json has every number of every printed table, to the digits printed."""
    argv = ['--senses-off', 'nurse:0', '--explain', '--show', 'nurse']
    tables, printed = ask(capsys, *argv), say(sample, capsys, *argv)
    for row in tables['explain'][:15]:
        assert f'{row["adds"]:+.3f}' in printed and f'{row["= alpha"]:.3f}' in printed
        assert f'{row["* C.E"]:+.2f}  {row["token"]:<10}'.rstrip() in printed
    for row in tables['show nurse']:
        assert f'  {row[""]}  {row["1"][0]} {row["1"][1]:+.2f}' in printed
    (_, table), = ask(capsys, *argv[:2]).items()
    printed = say(sample, capsys, *argv[:2])
    assert all(f'{r["before"]:.3f}  {r["after"]:.3f}' in printed and r['next word'] in printed for r in table)


# -----------------------------------------------------------------------------
# Edit.


def test_all_edits_add_up_in_one_command(out, capsys):
    """Senses off and scaled, * and ranges, replaced words and topics of several strengths compose to one
    edit; texts after it are those that generate writes with it."""
    world = World(prompt='The MacBook is made by')
    macbook, apple, hp, iphone, sony, made = map(world.id, ('MacBook', 'Apple', 'HP', 'iPhone', 'Sony', 'is'))
    edits = [senses.scale_senses(None, [2], 0.0), senses.scale_senses([made], [3, 4, 5], 0.5),
             senses.replace_word(world.model, [macbook], apple, hp),
             senses.replace_word(world.model, [iphone], apple, sony)]
    for words, strength in ((['film', 'tv', 'video'], senses.STRENGTHS[1]), (['food', 'soup'], (3, 2, 1.5, 1))):
        scores = senses.affinity(world.model, bag_of_words(world.encoding, words))
        edits.append(senses.topic(world.model, scores, strength))
    argv = ['--start', 'The MacBook is made by', '--senses-off', '*:2', '--senses-scale', 'is:3-5=0.5', '--replace',
            'MacBook: Apple -> HP', 'iPhone:Apple->Sony', '--topic', 'film_tv_video', '--topic', 'food, soup',
            '--strength', '1', '3,2,1.5,1', '--temperature', '0']
    rows, said = ask(capsys, *argv)['next words'], say(sample, capsys, *argv)
    check_next_words(world, rows, {'before': world.probs(), 'after': world.probs(*edits)})
    out = world.model.generate(world.idx, 60, temperature=0, edit=senses.compose(edits))[0].tolist()
    end = out.index(world.encoding.eot_token) if world.encoding.eot_token in out else None
    assert f'\nafter 1: {world.encoding.decode(out[:end])}\n' in said
    assert "what ' MacBook' says of ' Apple' it says of ' HP'\n" in said and '\nTopic: film, tv, video; ' in said


def test_export_writes_what_from_reads(out, capsys):
    """--export writes a folder that --from takes for the same model, with the same words and texts."""
    assert 'exported: written\n' in say(sample, capsys, '--export', 'exported')
    one, two = (say(sample, capsys, '--from', source, '--senses-off', 'nurse:3').split('\n', 1)[1]
                for source in ('out/toy', 'exported'))
    assert one == two and 'exists' in error_of(sample, capsys, '--export', 'exported')


# -----------------------------------------------------------------------------
# Bad input.


@pytest.mark.parametrize('command, message', [
    ('--senses-off nurse:3 nurse:16', 'senses 0 to 15'), ('--senses-off nurse', 'is not WORD:SENSES'),
    ('--senses-off zebra:1', "'zebra' is no single word"), ('--senses-scale nurse:10', 'FACTOR'),
    ('--replace Wii:HP->Xerox', "'Xerox'"), ('--topic music zebras', "'zebras' is no word"),
    ('--topic sport', 'a topic of Table 10: sports'), ('--topic music --strength 4', 'neither 0, 1, 2 or 3'),
    ('--strength 2', '--strength goes with --topic'), ('--topic music --strength 1 2', 'one for each'),
    ('--show nurse zebra', "'zebra'"), ('--show nurse:16', 'senses 0 to 15'), ('--find she/', 'A/B'),
    ('--find she/he --word zebra', "'zebra'"), ('--find music+guitar --word nurse', '--word goes with --find A/B'),
    ('--explain she/zebra', "'zebra'"), ('--sweep nurse', 'WORD:SENSES'), ('--weights median', "'median'"),
    ('--start FILE:nowhere', 'cannot be read as text'), ('--temperature -1', 'float from 0'), ('--top-k 0', 'int from 1'),
    ('--num-samples two', "'two'"), ('--device abacus', 'device abacus cannot be used'), ('--frobnicate', '--help'),
    ('--json x.json', '--json goes with'), ('--show nurse --json x.pt', 'ends in .json'),
    ('--export x --senses-off nurse:1', '--export writes the model as it is'), ('--export out', 'exists')])
def test_a_bad_command_is_one_line(command, message, out, capsys):
    """Exit code 2 and one line that names what was given and what is allowed; no half of an answer."""
    assert message in error_of(sample, capsys, *command.split(), printed=1) and not Path('x.json').exists()


@pytest.mark.parametrize('flag', [
    '--senses-off nurse:1', '--senses-scale nurse:1=2', '--replace nurse:she->he', '--topic music', '--show nurse',
    '--find she/he', '--find music', '--similar nurse', '--explain', '--weights', '--sweep nurse:1', '--html x.html'])
def test_a_transformer_has_no_senses(flag, out, capsys):
    """Every flag that needs senses is refused for a Transformer; without one it writes text."""
    as_transformer('gpt.pt')
    assert 'gpt.pt is a Transformer and has no senses' in error_of(sample, capsys, '--from', 'gpt.pt', *flag.split())
    assert 'Transformer gpt.pt: ' in say(sample, capsys, '--from', 'gpt.pt', '--max-new-tokens', '3')


@pytest.mark.slow
def test_the_command_works_as_typed(out):
    """python sample.py --senses-off nurse:10 in a fresh process ends with exit code 0 and shows both columns;
    weights without a tokenizer are one line."""
    done = [subprocess.run([sys.executable, ROOT / 'sample.py', *argv], capture_output=True, text=True) for argv in
            (['--senses-off', 'nurse:10'], ['--from', ROOT / 'tests' / 'fixtures' / 'gpt2-tiny'])]
    assert done[0].returncode == 0 and not done[0].stderr and '\nafter 2: ' in done[0].stdout
    assert done[1].returncode == 2 and 'no known tokenizer is described' in done[1].stderr
