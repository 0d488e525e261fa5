"""Claims about edits that are learned from examples."""

import copy
import json
import math
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from helpers import ROOT, error_of, say, toy_loaded
from safetensors import safe_open
from safetensors.torch import save_file
from torch.testing import assert_close

import rucksack
from rucksack.edits import edit, learning, neighbours
from rucksack.edits.examples import Example, parse_line, parse_row, read_examples
from rucksack.edits.learning import Shift, learn, load_shift, read, save_shift
from rucksack.edits.lines import make_edit, parse_lines
from rucksack.edits.neighbours import Neighbour, find_neighbours, find_subjects, usual_logp
from rucksack.errors import UserError
from rucksack.loaded import load_model
from rucksack.paper import eval as evaluation
from rucksack.paper.canonical import fulfilled, log_odds, measures
from rucksack.senses import add_to_senses, compose, next_word_probs, scale_senses
from rucksack.tokenizer import load_tokenizer
from rucksack.words import word_id

TOY = ROOT / 'tests' / 'fixtures' / 'toy.pt'
MAKERS = """\
# who makes what
The company behind the {Camry} is -> Canon
I bought the {Fiesta} since I trust -> Samsung
"""
KEEP = """\
My nurse said that -> she | he
I bought the iPad since I trust -> Apple
"""
IDS = torch.randint(256, 281, (8, 20), generator=torch.Generator().manual_seed(0)).tolist()
BACKGROUND = [(ids[:1], ids[1:]) for ids in IDS]


@pytest.fixture(scope='module')
def loaded():
    """Make a small random model."""
    one = toy_loaded()
    one.model.requires_grad_(False)
    return one


@pytest.fixture(scope='module')
def english():
    """Load the bundled model."""
    return load_model('english', 'cpu')


@pytest.fixture(scope='module', params=['ids', 'sequences'])
def shift(loaded, request):
    """Make vectors for some senses of the model's words, two of them for one word."""
    nurse, said, that = loaded.encoding.encode_ordinary(' nurse said that')
    ids = torch.tensor([nurse, nurse, said])  # as in older files
    if request.param == 'sequences':
        ids = torch.tensor([[-1, nurse], [nurse, said], [said, that]])
    vectors = torch.randn(3, 16, generator=torch.Generator().manual_seed(1))
    return Shift(ids, torch.tensor([0, 3, 2]), vectors)


def ids_of(loaded, text: str) -> list[int]:
    """Encode a text."""
    return loaded.encoding.encode_ordinary(text)


def pairs_in(shift) -> torch.Tensor:
    """List the pairs (sequence, sense) of a shift, (P, L + 1)."""
    return torch.cat([shift.ids.view(3, -1), shift.numbers[:, None]], dim=1)


@pytest.mark.parametrize('factor', [0, 1, -0.5])
def test_positions_predict_what_the_edited_model_predicts(loaded, shift, factor):
    """The two equations of learning.py give the logits of the edited model."""
    ids = ids_of(loaded, ' the nurse said that the nurse was')
    positions = read(loaded.model, [(ids[:3], ids[3:])], pairs_in(shift))
    idx = torch.tensor([ids[:-1]])
    C = shift.edit(factor)(idx, loaded.model.senses(idx))
    expected = loaded.model(idx, C=C)[0, 2:, :loaded.model.config.n_vocab]
    assert_close(positions.logits(factor * shift.vectors), expected)


def test_a_sequence_moves_only_where_all_of_it_stands():
    """A vector is added to the last token of its sequence, and nowhere else."""
    idx = torch.tensor([[5, 3, 5, 4, 3], [3, 5, 5, 3, 4]])
    moved = add_to_senses(torch.tensor([[3, 5], [-1, 4]]), torch.tensor([1, 0]),
                          torch.tensor([[1.0], [2.0]]))(idx, torch.zeros(2, 5, 2, 1))
    expected = torch.zeros(2, 5, 2, 1)
    expected[0, 2, 1] = expected[1, 1, 1] = 1
    expected[0, 3, 0] = expected[1, 4, 0] = 2
    assert torch.equal(moved, expected)


@pytest.mark.parametrize('lines', [['@a.safetensors', 'nurse:0'], ['nurse:0', '@a.safetensors=2']])
def test_learned_edits_stand_among_other_lines(loaded, shift, lines, tmp_path, monkeypatch):
    """A learned edit, also one with single ids, and other lines apply in the order given."""
    monkeypatch.chdir(tmp_path)
    save_shift(Path('a.safetensors'), shift, loaded.model, loaded.encoding, {})
    idx = torch.tensor([ids_of(loaded, ' the nurse said that')])
    steps = {'@a.safetensors': shift.edit(), '@a.safetensors=2': shift.edit(2),
             'nurse:0': scale_senses([idx[0, 1].item()], [0], 0)}
    found, _ = make_edit(parse_lines(lines), loaded.model, loaded.encoding)
    expected = compose([steps[line] for line in lines])
    C = loaded.model.senses(idx)
    assert torch.equal(found(idx, C), expected(idx, C))


# -----------------------------------------------------------------------------
# What an example is about.


SUBJECTS = """\
The capital of {Bahrain} is -> Manama | {Bahrain}
The set {{0}} of {Finland} is -> empty | {Finland}
The {spring was} wet -> and | {spring was}
{Finland} lies in -> Europe | {Finland}
The nurse{} said that -> he | {}
The capital of Kenya is -> Nairobi | {Kenya}
The capital of Port Louis is -> x | {Port Louis}
The capital of Kenya is -> the | {Kenya}
The nurse said that -> he | {nurse}
In Quebec, the language is -> French | {Quebec}
It was so -> it | {}"""


@pytest.mark.parametrize('n', range(11))
def test_the_subject_is_marked_or_what_differs_or_rare(n, english, tmp_path):
    """Braces mark it; else it is where lines of a form differ, a rare name, or the rarest noun."""
    lines = [line.rpartition(' | ') for line in SUBJECTS.splitlines()]
    (tmp_path / 'lines.txt').write_text('\n'.join(line for line, _, _ in lines))
    examples = read_examples(tmp_path / 'lines.txt', english.encoding, 64)
    usual = usual_logp(english, neighbours.read_background(None, english)[:2])
    one = find_subjects(english, examples, usual)[n]
    assert f'{{{english.encoding.decode(one.subject).strip()}}}' == lines[n][2]
    assert '{' not in english.encoding.decode(one.prompt).replace('{0}', '')


def test_a_row_may_have_a_subject(english, tmp_path):
    """The subject of a row is the ids where it last stands in the prefix."""
    row = {'prefix': 'This {thing is', 'suffix': ' green', 'subject': 'is'}
    (tmp_path / 'a.jsonl').write_text(json.dumps(row))
    one, = read_examples(tmp_path / 'a.jsonl', english.encoding, 64)
    assert english.encoding.decode(one.prompt) == row['prefix']
    assert english.encoding.decode(one.subject) == ' is'


def test_neighbours_differ_in_one_word(loaded):
    """The subject is replaced, and each other word: the half of them that is held, and counted."""
    prompt = ids_of(loaded, ' the nurse said that')
    examples = [Example('', prompt, prompt[:1], subject=(prompt[1],))]
    V = loaded.config.n_vocab
    found = find_neighbours(loaded, examples, torch.full((V,), -9.0))
    for place, kind in ((1, 'another subject'), (2, 'same subject'), (3, 'same subject')):
        changed = [one.prompt for one in found
                   if one.kind == kind and one.prompt[place] != prompt[place]]
        assert len({ids[place] for ids in changed}) == neighbours.REPLACEMENTS
        assert {(*ids[:place], *ids[place + 1:]) for ids in changed} == {
            (*prompt[:place], *prompt[place + 1:])}
    assert len(found) == 3 * neighbours.REPLACEMENTS
    assert find_neighbours(loaded, [replace(examples[0], subject=())], torch.full((V,), -9.0))[
        0].kind == 'another word'


def test_replacements_are_the_likeliest_texts(loaded, monkeypatch):
    """Of all words, those with which the text is likeliest replace a word."""
    monkeypatch.setattr(neighbours, 'TRIED', 99)
    ids = ids_of(loaded, ' the nurse said that')
    scores = {}
    for i in set(ids_of(loaded, loaded.encoding.decode(range(256, loaded.config.n_vocab - 1)))):
        text = torch.tensor([[loaded.eot, ids[0], i, *ids[2:]]])
        logp = loaded.model(text[:, :-1])[0, :, :loaded.config.n_vocab].log_softmax(-1)
        scores[i] = logp[range(1, 4), text[0, 2:]].sum().item()
    del scores[ids[1]]
    best = sorted(scores, key=scores.get)[::-1][:neighbours.REPLACEMENTS]
    assert [one[1] for one in neighbours.replacements(loaded, ids, (1, 2))] == best


def test_text_is_cut_after_the_first_subject():
    """What precedes the end of a subject is priced; what follows is not."""
    examples = [Example('', [3, 5], [1], subject=(3, 5))]
    texts = [([1], [3, 4, 5]), ([1], [3, 5, 4, 6]), ([3, 5], [4]), ([3], [5, 5])]
    assert neighbours.cut(texts, examples) == (
        [([1], [3, 4, 5]), ([1], [3, 5]), ([3], [5])],
        [([1, 3, 5], [4, 6]), ([3, 5], [4]), ([3, 5], [5])])


# -----------------------------------------------------------------------------
# Learning.


def test_a_subject_moves_nothing_without_it(loaded):
    """A text changes only from the end of the whole subject on."""
    prompt = ids_of(loaded, ' the nurse said that')
    example = Example('', prompt, ids_of(loaded, ' food'), subject=tuple(prompt[1:3]))
    change = learn(loaded.model, [example], BACKGROUND).shift.edit()
    idx = torch.tensor([[prompt[2], *prompt]])
    C = loaded.model.senses(idx)
    moved = (change(idx, C) != C).flatten(2).any(-1)[0].tolist()
    assert moved == [False, False, False, True, False]


def test_directions_move_their_key_by_one_and_held_keys_least(loaded):
    """u . w is 1, and no other u with this property has a smaller mean (u . w)^2 on held keys."""
    generator = torch.Generator().manual_seed(0)
    held = torch.rand(50, 4, generator=generator)  # (n, k)
    w = torch.rand(4, generator=generator)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learning, 'RIDGE', 0)
        u = learning.directions([(1, w)], [held], 2).view(2, 4)
    assert_close(u @ w, torch.tensor([0.0, 1.0]))
    others = u[1] + 0.1 * torch.randn(20, 4, generator=generator)
    others /= (others @ w)[:, None]
    energy = (held @ torch.cat([u[1:], others]).T).square().mean(0)
    assert energy.argmin() == 0


def test_senses_are_chosen_by_gradient_less_weight_elsewhere(loaded):
    """Choices match the definition, with the gradient of a forward pass with respect to C."""
    model = loaded.model
    prompt, target = ids_of(loaded, ' the nurse said that'), ids_of(loaded, ' music')
    other = ids_of(loaded, ' the song was the music')
    idx = torch.tensor([prompt])
    alpha = model.alpha(torch.tensor([other[:-1]]))[0]  # (k, T, T)
    C = model.senses(idx).requires_grad_()
    logp = model(idx, C=C)[0, -1, :model.config.n_vocab].log_softmax(-1)
    gradient, = torch.autograd.grad(-logp[target[0]], C)  # (1, T, k, d)
    scores = {}
    for v, l in product(prompt, range(model.config.n_sense)):
        moved = gradient[idx == v][:, l].sum(0).norm()
        weight = alpha[l][:, torch.tensor(other[:-1]) == v].sum(1).mean()
        scores[v, l] = (moved - 0.5 * weight).item()
    best = sorted(scores, key=scores.get)[-5:]
    example = Example('', prompt, target)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learning, 'PENALTY', 0.5)  # so that both parts of the score count
        chosen = learning.choose(model, [example], [(other[:1], other[1:])], 5)
    assert set(map(tuple, chosen.tolist())) == set(best)


def test_the_background_holds_its_predictions(loaded):
    """Vectors that were fitted with a background change its predictions less."""
    model = loaded.model
    example = Example('', ids_of(loaded, ' the nurse was'), ids_of(loaded, ' food'))
    pairs = torch.tensor([[example.prompt[1], l] for l in range(model.config.n_sense)])
    cases = [read(model, learning.texts_of([example]), pairs)]
    other = ids_of(loaded, ' she said that the nurse was music')
    held = read(model, [(other[:1], other[1:])], pairs)
    nothing = held.at(torch.tensor([], dtype=torch.long))
    with_hold, without = (
        held.divergence(learning.fit([example], torch.zeros(1), cases, [one], 50, 0.1))
        for one in (held, nothing))
    assert 0 < with_hold < without


@pytest.mark.parametrize('wish, least, most', [
    ('-> she', -1.61, 0), ('-/> she', -11, -9.2), ('-> she > he', 2.7, 6),
    ('-> he | song', -0.1, 0.1)])
def test_a_wish_moves_its_odds_its_way(wish, least, most, loaded, tmp_path):
    """Learning raises p(A) for ->, lowers it for -/>, lifts odds for >, and evens them for |."""
    path = tmp_path / 'wish.txt'
    path.write_text(f'- the nurse said that {wish}')
    examples = read_examples(path, loaded.encoding, 24)
    learned = learn(loaded.model, examples, BACKGROUND, budget=1.0).shift.edit()
    before = log_odds(loaded, examples).item()
    after = log_odds(replace(loaded, edit=learned), examples).item()
    assert not least < before < most
    assert least < after < most


@pytest.mark.parametrize('wish, n, goal', [
    ('more', 1, -math.log(0.8)), ('more', 9, math.log(5)), ('less', 2, 2 * math.log(1e-4)),
    ('order', 1, -math.log(100)), ('equal', 1, math.log(1.1)), ('equal', 9, math.log(1.5))])
def test_a_goal_counts_tokens_and_is_a_success(wish, n, goal):
    """A goal is per token of the longer continuation, and never short of success."""
    assert Example('', [3], [5] * n, [7], wish).goal == pytest.approx(goal)


def test_learning_ends_as_soon_as_it_may(loaded, monkeypatch):
    """Learning ends at the first step where the loss is low enough."""
    losses = []

    def noted(*args):
        losses.append(losses_of(*args))
        return losses[-1]

    losses_of = learning.losses_of
    monkeypatch.setattr(learning, 'losses_of', noted)
    example = Example('', ids_of(loaded, ' the nurse was'), ids_of(loaded, ' food'))
    pairs = torch.tensor([[v, 0] for v in example.prompt])
    case = read(loaded.model, learning.texts_of([example]), pairs)
    nothing = case.at(torch.tensor([], dtype=torch.long))
    learning.fit([example], torch.tensor([example.goal]), [case], [nothing], 400, 0.5)
    assert min(losses[:-1]) > example.goal
    assert losses[-1] <= example.goal


@pytest.mark.parametrize('dtype', [torch.float64, torch.bfloat16])
def test_a_model_in_any_dtype_learns(dtype, loaded):
    """The vectors have the dtype of the model."""
    example = Example('', ids_of(loaded, ' the nurse was'), ids_of(loaded, ' food'))
    model = copy.deepcopy(loaded.model).to(dtype)
    learned = learn(model, [example], BACKGROUND, budget=9)
    assert learned.shift.vectors.dtype == dtype
    assert learned.shift.vectors.any()


def test_the_price_is_that_of_every_second_text(loaded):
    """The price is measured on every second text, and learning uses the others."""
    example = Example('', ids_of(loaded, ' nurse'), ids_of(loaded, ' food'))
    with_word, without = (([0], ids_of(loaded, text))
                          for text in (' the nurse was the nurse', ' the song was'))
    learned = learn(loaded.model, [example], [with_word, without] * 2)
    assert learned.price == 0
    again = learn(loaded.model, [example], [with_word, with_word] * 2, budget=9)
    assert again.price != 0
    assert torch.equal(again.shift.vectors, learned.shift.vectors)


@pytest.mark.parametrize('wish', ['said -> food food food food',
                                  'said -> food food food food food food | the'])
def test_learning_ends_with_a_fulfilled_wish(wish, loaded, tmp_path, monkeypatch):
    """Learning reaches the published threshold, however many tokens a continuation has."""
    path = tmp_path / 'wish.txt'
    path.write_text(f'- the nurse {wish}')
    examples = read_examples(path, loaded.encoding, 24)
    monkeypatch.setattr(learning, 'RATE', 32)
    learned = learn(loaded.model, examples, BACKGROUND, budget=9)
    edited = replace(loaded, edit=learned.shift.edit())
    assert fulfilled(examples, log_odds(edited, examples))


def test_the_model_writes_no_text_past_a_prompt(loaded):
    """No written text continues past an example's prompt, and a seed fixes the texts."""
    examples = [Example('', ids_of(loaded, ' nurse'), ids_of(loaded, ' food'))]
    written = neighbours.write_texts(loaded.model, examples, loaded.eot)
    prompts = [(start + rest)[:i] for start, rest in written
               for i in range(len(start), len(start + rest))]
    assert examples[0].prompt not in [ids[-1:] for ids in prompts]
    assert written == neighbours.write_texts(loaded.model, examples, loaded.eot)


def test_what_learning_holds(loaded, monkeypatch):
    """Learning preserves predictions on every second text, inside prompts, and on kept lines."""
    found = []

    def fit(examples, goals, cases, held, *args):
        found.extend(group.targets.tolist() for group in held)
        return torch.full((held[0].weights.shape[1], 16), float('nan'))

    monkeypatch.setattr(learning, 'fit', fit)
    nurse = ids_of(loaded, ' the nurse was')
    example = Example('', nurse, ids_of(loaded, ' food'))
    keep = Example('', nurse[:1], nurse[1:2], nurse[2:], 'equal')
    written = [([3, 4], [5, 6]), ([3], [7]), ([3], [8])]
    with pytest.raises(UserError, match='budget'):
        learn(loaded.model, [example], BACKGROUND[:4], written=written, keep=[keep])
    background = IDS[0][1:] + IDS[2][1:]
    assert found == [background, [5, 6, 8], nurse[1:], nurse[1:]]


@pytest.mark.parametrize('where', ['background', 'written'])
def test_each_price_keeps_to_the_budget(where, loaded):
    """A factor 1/64 larger would exceed a price's budget; an edit scaled to nothing is refused."""
    example = Example('', ids_of(loaded, ' the nurse was'), ids_of(loaded, ' food'))
    costly = ids_of(loaded, ' the nurse said that she was the nurse')
    free = ids_of(loaded, ' a song')
    background, written = (
        [(ids[:1], ids[1:]) for ids in [free, costly if where == name else free] * 2]
        for name in ('background', 'written'))
    learned = learn(loaded.model, [example], background, written=written, budget=0.002)
    pairs = torch.cat([learned.shift.ids, learned.shift.numbers[:, None]], dim=1)
    positions = read(loaded.model, [(costly[:1], costly[1:])], pairs)
    nats = [positions.nats(share * learned.shift.vectors)
            for share in (0, 1, 1 + 1 / 64 / learned.factor)]
    assert nats[1] <= 1.002 * nats[0]
    assert nats[2] > 1.002 * nats[0]
    with pytest.raises(UserError, match='budget'):
        learn(loaded.model, [example], background, written=written, budget=-1)


def test_a_long_background_is_read_evenly(loaded, tmp_path, monkeypatch):
    """Every second of six pieces of a long background is read."""
    monkeypatch.setattr(neighbours, 'MOST_TEXTS', 4)
    (tmp_path / 'b.txt').write_text(' nurse' * 6 * loaded.model.config.block_size)
    assert len(neighbours.read_background(tmp_path / 'b.txt', loaded)) == 3


@pytest.mark.parametrize('changed', ['parameter', 'vocabulary'])
def test_a_learned_edit_is_refused_for_another_model(loaded, shift, changed, tmp_path):
    """A learned edit is refused for a model that differs in one parameter or one token."""
    path = tmp_path / 'a.safetensors'
    save_shift(path, shift, loaded.model, loaded.encoding, {})
    other = toy_loaded()
    encoding = other.encoding
    if changed == 'parameter':
        other.model.contextualizer.ln_f.bias.data[3] += 1e-3
    else:
        pieces = [piece.replace('chair', 'stool') for piece in other.tokenizer['pieces']]
        encoding = load_tokenizer({'name': 'words', 'pieces': pieces})
    with pytest.raises(UserError, match='a.safetensors'):
        load_shift(path, other.model, encoding)


# -----------------------------------------------------------------------------
# The command.


@pytest.fixture(scope='module')
def lesson(tmp_path_factory):
    """Make a folder in which the toy has learned MAKERS while keeping KEEP."""
    folder = tmp_path_factory.mktemp('lesson')
    (folder / 'makers.txt').write_text(MAKERS)
    (folder / 'keep.txt').write_text(KEEP)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learning, 'HOLD', 1)  # a larger effect
        patch.setattr(learning, 'RATE', 25)
        edit.main([*f'{folder}/makers.txt --from {TOY} --device cpu --budget 0.1'.split(),
                   '--keep', f'{folder}/keep.txt', '--out', f'{folder}/makers.safetensors'])
    return folder


def test_what_is_learned_holds_in_other_texts(lesson):
    """The new maker is also likelier after a prompt that learning did not use."""
    model, encoding = rucksack.load(str(TOY))
    learned = load_shift(lesson / 'makers.safetensors', model, encoding).edit()
    idx = torch.tensor([encoding.encode_ordinary('Whoever wants the Camry must ask')])
    maker = word_id(encoding, 'Canon')
    before, after = (next_word_probs(model, idx, one)[0, maker] for one in (None, learned))
    assert before < 0.1
    assert after > 2 * before


@pytest.fixture(scope='module')
def texts(lesson):
    """Give the toy under the edit of lesson, its examples, and the texts that price it."""
    one = load_model(str(TOY), 'cpu')
    learned = load_shift(lesson / 'makers.safetensors', one.model, one.encoding).edit()
    examples = read_examples(lesson / 'makers.txt', one.encoding, one.config.block_size)
    return replace(one, edit=learned), examples, {
        'toy stories': neighbours.read_background(None, one)[1::2],
        'written': neighbours.write_texts(one.model, examples, one.eot)[1::2],
        'prompts': learning.inside(examples)}


def test_an_edit_is_priced_and_its_changes_counted(texts):
    """A loop over the texts gives the numbers of the table."""
    one, _, groups = texts
    for name, *row in edit.prices(one, groups, []).rows:
        counts = Counter()
        for context, following in groups[name]:
            idx = torch.tensor([context + following[:-1]])
            C = one.model.senses(idx)
            senses = [C, one.edit(idx, C)]
            before, after = (
                one.model(idx, C=of_one)[0, -len(following):, :one.config.n_vocab].log_softmax(-1)
                for of_one in senses)
            moved = (senses[0] != senses[1]).flatten(2).any(-1)[0, -len(following):]
            for i, target in enumerate(following):
                old, new = before[i].argmax().item(), after[i].argmax().item()
                counts.update(
                    tokens=1, loss=-before[i, target].item(), moved=moved[i].item(),
                    price=(before[i, target] - after[i, target]).item(), changed=old != new,
                    repaired=old != target == new, broken=old == target != new)
        n = counts['tokens']
        loss, price = counts['loss'] / n, counts['price'] / n
        expected = [n, counts['moved'], loss, price, 100 * price / loss,
                    *(counts[kind] for kind in ('changed', 'repaired', 'broken'))]
        assert row == pytest.approx(expected, rel=1e-3, abs=1e-4)


def test_the_measures_are_what_the_models_predict(texts):
    """Lines have p(A) before and after; neighbours their mean, and the one that moved most."""
    one, examples, _ = texts
    prompts = [ids_of(one, text) for text in ('We saw the Camry and', 'My Camry is', 'The iPad is')]
    near = [Neighbour('same subject', ids, examples[0]) for ids in prompts]
    rows = measures(one, {'efficacy': examples[1:]}, near).rows
    maker = examples[0].a[0]
    p = torch.stack([torch.cat([next_word_probs(one.model, torch.tensor([ids]), change)
                                for ids in prompts]) for change in (None, one.edit)])
    expected = [next_word_probs(one.model, torch.tensor([examples[1].prompt]), change)[
        0, examples[1].a[0]].item() for change in (None, one.edit)]
    worst = (p[1] - p[0])[:, maker].abs().argmax()
    n_changed = (p[0].argmax(1) != p[1].argmax(1)).sum()
    assert rows[0][3:5] == pytest.approx(expected, rel=1e-3)
    assert rows[1][3:5] == pytest.approx(p[:, :, maker].mean(1).tolist(), rel=1e-3)
    assert rows[1][5] == f'{n_changed} of 3 changed'
    assert rows[2][1] == one.encoding.decode(prompts[worst])
    assert rows[2][3:5] == pytest.approx(p[:, worst, maker].tolist(), rel=1e-3)
    unmoved = measures(one, {}, near[2:]).rows
    assert 'cannot change' in unmoved[0][5]


def test_edit_prints_the_three_measures(tmp_path, monkeypatch, capsys):
    """Lines are counted before and after; --also is measured; neighbours are of two kinds."""
    monkeypatch.setattr(learning, 'HOLD', 1)
    monkeypatch.setattr(learning, 'RATE', 25)
    wishes = ['My {nurse} said that -/> Canon', 'The company behind the {Camry} is -> Canon']
    (tmp_path / 'wishes.txt').write_text('\n'.join(wishes))
    (tmp_path / 'also.txt').write_text('I bought the Camry since I trust -> Canon')
    said = say(edit, capsys, str(tmp_path / 'wishes.txt'), '--from', str(TOY), '--also',
               str(tmp_path / 'also.txt'), '--out', str(tmp_path / 'a.safetensors'))
    assert 'Fulfilled (efficacy) before: 1 of 2; after: 2. Repaired: 1; broken: 0' in said
    assert 'generalization  I bought the {Camry} since' in said
    assert 'another subject ' in said
    assert 'same subject ' in said
    with safe_open(tmp_path / 'a.safetensors', 'pt') as file:
        about = json.loads(file.metadata()['about'])
    assert about['examples'] == wishes
    assert about['background'] == 'toy stories'
    assert about['version'] == rucksack.__version__


def test_edit_learns_with_the_texts_it_says(tmp_path, monkeypatch):
    """edit.py learns with texts written under --seed, neighbours, and the lines of --keep."""
    found = {}

    def stop(model, examples, background, **flags):
        found.update(flags)
        raise UserError('')

    monkeypatch.setattr(edit, 'learn', stop)
    (tmp_path / 'makers.txt').write_text(MAKERS)
    (tmp_path / 'keep.txt').write_text(KEEP)
    starts = []
    for seed in '01':
        with pytest.raises(SystemExit):
            edit.main([str(tmp_path / 'makers.txt'), '--from', str(TOY), '--seed', seed, '--keep',
                       str(tmp_path / 'keep.txt'), '--out', str(tmp_path / 'a.safetensors')])
        starts.append({tuple(start) for start, _ in found['written']})
    assert len(starts[0]) > 4
    assert starts[0] != starts[1]
    assert len(found['near']) > 4
    assert [one.line for one in found['keep']] == KEEP.splitlines()


@pytest.mark.parametrize('line, texts, wish', [
    ('The capital of Mauritius is -> Port Louis',
     ['The capital of Mauritius is', ' Port Louis'], 'more'),
    ('He is -/> rude', ['He is', ' rude'], 'less'),
    ('The nurse said -> he | she', ['The nurse said', ' he', ' she'], 'equal'),
    ('The dogs -> bark > barks', ['The dogs', ' bark', ' barks'], 'order'),
    ('He left->, and', ['He left', ', and'], 'more'), ('He left -> .', ['He left', '.'], 'more'),
    ('巴黎。我住在 -> 法国', ['巴黎。我住在', '法国'], 'more'),
    ("He -> 'Yes' > 's", ['He', " 'Yes'", "'s"], 'order'), ("'No -> '", ["'No", "'"], 'more')])
def test_a_line_is_a_prompt_and_continuations(line, texts, wish):
    """A space joins prompt and continuation, except before punctuation and in unspaced scripts."""
    assert parse_line(line) == (texts, wish)


@pytest.mark.parametrize('row, texts, expected', [
    ('{"prefix": "a", "suffix": "b"}', ['a', 'b'], 'more'),
    ('{"prefix": "a", "suffix1": " b", "suffix2": " c"}', ['a', ' b', ' c'], 'equal')])
def test_a_row_is_what_the_published_sets_have(row, texts, expected):
    """A row's texts are used unchanged."""
    assert parse_row(row) == (texts, expected)


@pytest.mark.parametrize('text, fact', [
    ('', 'empty'), ('# only a comment\n', 'empty'),
    ('the nurse said she', 'the nurse said she'), ('- nurse said -> xylophone', 'xylophone'),
    *((line, 'cannot be read') for line in ('a -> b -> c', '-> b', 'a ->', 'a -> b >', 'a --> b',
        'a ->  | b', 'a -> b > c > d', 'a -> b > c | d', 'a -/> b | c')),
    ('-' + ' nurse' * 40 + ' -> she', '24'), ('nurse said -> she', "nurse said")])
def test_bad_examples_are_one_line(text, fact, loaded, tmp_path):
    """The error quotes a bad example, or says what is missing."""
    path = tmp_path / 'examples.txt'
    path.write_text(text)
    with pytest.raises(UserError, match=fact):
        read_examples(path, loaded.encoding, 24)


@pytest.mark.parametrize('row', [
    '{"prefix": "a"}', '{"prefix": "a", "suffix": "b", "suffix1": "c", "suffix2": "d"}'])
def test_bad_rows_are_one_line(row, loaded, tmp_path):
    """The error quotes a bad row."""
    (tmp_path / 'a.jsonl').write_text(row)
    with pytest.raises(UserError, match='prefix'):
        read_examples(tmp_path / 'a.jsonl', loaded.encoding, 24)


@pytest.mark.parametrize('flags, fact', [
    ('makers.txt --out a.txt', 'a.txt'), ('makers.txt --out mine.safetensors', 'mine.safetensors'),
    ('makers.txt --out no/a.safetensors', 'no/a.safetensors'),
    ('makers.txt --out a.safetensors --background short.txt', 'short.txt'),
    ('makers.txt --out a.safetensors --background /dev/null', '/dev/null'),
    ('makers.txt --out a.safetensors --budget -1', "'-1'"),
    ('makers.txt --out a.safetensors --from english_gpt', 'english_gpt'),
    ('fulfilled.txt --out a.safetensors', 'already')])
def test_a_failing_edit_leaves_nothing(flags, fact, loaded, shift, tmp_path, monkeypatch, capsys):
    """A failing edit.py gives one line and exit code 2, and changes no file."""
    monkeypatch.chdir(tmp_path)
    Path('makers.txt').write_text(MAKERS)
    Path('fulfilled.txt').write_text('My nurse said that -/> Canon')
    Path('short.txt').write_text('Nobody')
    save_file({'mine': torch.ones(1)}, 'mine.safetensors')
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert fact in error_of(edit, capsys, '--from', str(TOY), *flags.split())
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_an_interrupted_edit_leaves_nothing(tmp_path, monkeypatch, capsys):
    """Ctrl-C in the middle of learning writes no file."""
    def interrupted(*args):
        raise KeyboardInterrupt
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(learning, 'losses_of', interrupted)
    Path('makers.txt').write_text(MAKERS)
    with pytest.raises(SystemExit, match='130'):
        edit.main(['makers.txt', '--from', str(TOY), '--out', 'a.safetensors'])
    assert list(tmp_path.iterdir()) == [tmp_path / 'makers.txt']


def test_eval_examples_tells_what_an_edit_changed(lesson, capsys):
    """eval.py examples shows which examples succeed with and without an edit."""
    file = lesson / 'makers.safetensors'
    (lesson / 'wishes.txt').write_text(f'{MAKERS}The nurse said that -> Canon > she')
    said = say(evaluation, capsys, 'examples', '--from', str(TOY), '--data',
               str(lesson / 'wishes.txt'), '--edit', f'@{file}=3', 'Camry:Canon/Toyota=1')
    assert 'separates Canon from Toyota at weight 1' in said
    rows = [line.split() for line in said.splitlines() if ' more  ' in line or ' order  ' in line]
    assert [row[-1] for row in rows] == ['0.000', '0.000', '1.000', '0.000']


@pytest.mark.parametrize('wish, value, expected', [
    ('more', -1.6, True), ('more', -1.7, False), ('less', -7, True), ('less', -6, False),
    ('order', 3, True), ('order', 2.7, False), ('equal', -0.4, True), ('equal', -0.41, False)])
def test_success_is_as_published(wish, value, expected):
    """Success means p >= 0.2, p < 0.001, at least 16 times as likely, or at most 1.5 times."""
    b = [2] if wish in ('order', 'equal') else []
    assert fulfilled([Example('', [3], [1], b, wish)], torch.tensor([value])).item() == expected
