"""Claims about edits that are learned from examples."""

import copy
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import ROOT, error_of, say, toy_loaded
from safetensors import safe_open
from safetensors.torch import save_file
from torch.testing import assert_close

from rucksack.edits import edit, learning, neighbours
from rucksack.edits.examples import Example, parse_line, parse_row, read_examples
from rucksack.edits.learning import learn
from rucksack.edits.lines import make_edit, parse_lines
from rucksack.edits.neighbours import neighbours_of
from rucksack.edits.positions import Positions, read
from rucksack.edits.shifts import Shift, load_shift, make_shift, save_shift
from rucksack.errors import UserError
from rucksack.loaded import load_model
from rucksack.paper import eval as evaluation
from rucksack.paper.canonical import measures, outcomes
from rucksack.paper.likelihood import score
from rucksack.senses import compose, next_word_probs, scale_senses
from rucksack.tokenizer import load_tokenizer

TOY = ROOT / 'tests' / 'fixtures' / 'toy.pt'
MAKERS = """\
# who makes what
The company behind the {Camry} is -> Canon
I bought the {Fiesta} since I trust -> Samsung
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


def test_a_sequence_moves_only_where_all_of_it_stands():
    """A vector is added to the last token of its sequence, and nowhere else."""
    idx = torch.tensor([[5, 3, 5, 4, 3], [3, 5, 5, 3, 4]])
    vectors = torch.tensor([[0.0, 0], [0, 1], [2, 0], [0, 0]])  # of two senses each
    moved = make_shift([(3, 5), (4,)], vectors).edit()(idx, torch.zeros(2, 5, 2, 2))
    expected = torch.zeros(2, 5, 2, 2)
    expected[0, 2, 1, 1] = expected[1, 1, 1, 1] = 1
    expected[0, 3, 0, 0] = expected[1, 4, 0, 0] = 2
    assert torch.equal(moved, expected)


def ids_of(loaded, text: str) -> list[int]:
    """Encode a text."""
    return loaded.encoding.encode_ordinary(text)


@pytest.mark.parametrize('factor', [1, -0.5])
def test_positions_predict_what_the_edited_model_predicts(loaded, factor):
    """The two equations of positions.py give the logits of the edited model."""
    ids = ids_of(loaded, ' the nurse said that the nurse was')
    sequences = [(ids[1],), (ids[1], ids[2]), (ids[2], ids[3])]
    vectors = factor * torch.randn(12, 16, generator=torch.Generator().manual_seed(1))
    positions = read(loaded.model, [(ids[:3], ids[3:])], sequences)
    idx = torch.tensor([ids[:-1]])
    C = make_shift(sequences, vectors).edit()(idx, loaded.model.senses(idx))
    expected = loaded.model(idx, C=C)[0, 2:, :loaded.model.config.n_vocab]
    assert_close(positions.logits(vectors), expected)


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


def test_the_subject_is_marked_or_what_differs_or_rare(english, tmp_path):
    """Braces mark it; else it is where lines of a form differ, a rare name, or the rarest noun."""
    lines = [line.rpartition(' | ') for line in SUBJECTS.splitlines()]
    (tmp_path / 'lines.txt').write_text('\n'.join(line for line, _, _ in lines))
    examples = read_examples(str(tmp_path / 'lines.txt'), english)
    background = neighbours.read_background(None, english)[:2]
    found, _ = neighbours_of(english, examples, background)
    subjects = [f'{{{english.encoding.decode(one.subject).strip()}}}' for one in found]
    assert subjects == [subject for _, _, subject in lines]
    assert english.encoding.decode(found[1].prompt) == 'The set {0} of Finland is'


def test_a_row_may_have_a_subject_and_a_wish(english, tmp_path):
    """The subject of a row is the ids where it last stands in the prefix."""
    row = {'prefix': 'This thing {is}', 'suffix': ' green', 'subject': 'is', 'wish': 'less'}
    (tmp_path / 'a.jsonl').write_text(json.dumps(row))
    one, = read_examples(str(tmp_path / 'a.jsonl'), english)
    assert english.encoding.decode(one.prompt) == row['prefix']
    assert english.encoding.decode(one.subject) == 'is'
    assert one.wish == 'less'
    pair = '{"prefix": "a", "suffix1": "b", "suffix2": " c"}'
    assert parse_row(pair) == (['a'], ['b', ' c'], 'equal')


def test_neighbours_differ_in_one_word(loaded):
    """The subject is replaced, and each other word, by as many words each."""
    prompt = ids_of(loaded, ' the nurse said that')
    example = Example('', prompt, prompt[:1], subject=(prompt[1],))
    _, found = neighbours_of(loaded, [example], BACKGROUND)
    places = {}
    for one in found:
        place, = [i for i in range(4) if one.prompt[i] != prompt[i]]
        places.setdefault((place, one.kind), set()).add(one.prompt[place])
    assert set(places) >= {(1, 'another subject'), (2, 'same subject'), (3, 'same subject')}
    assert {len(ids) for ids in places.values()} == {neighbours.REPLACEMENTS}
    _, found = neighbours_of(loaded, [replace(example, subject=())], BACKGROUND)
    assert found[0].kind == 'another word'


def test_texts_about_a_subject_begin_with_it(loaded):
    """Each is longer by one token than the one before, and a line without a subject has none."""
    nurse = tuple(ids_of(loaded, ' nurse'))
    example = Example('', [1, *nurse], [2], subject=nurse)
    found = neighbours.write_about(loaded, [replace(example, subject=()), example])
    lengths = [len(one.prompt) - 1 for one in found]
    assert lengths == sorted(set(lengths) & set(range(1, neighbours.CONTINUED + 1)))
    assert {(*one.prompt[:1], *one.a, one.kind) for one in found} == {
        (*nurse, 2, 'same subject, other texts')}


def test_replacements_are_the_likeliest_texts(loaded, monkeypatch):
    """Of all words, those with which the text is likeliest replace a word."""
    monkeypatch.setattr(neighbours, 'TRIED', 99)
    ids = ids_of(loaded, ' the nurse said that')
    example = Example('', ids, ids)
    scores = {}
    for i in set(ids_of(loaded, loaded.encoding.decode(range(256, loaded.config.n_vocab - 1)))):
        text = torch.tensor([[loaded.eot, ids[0], i, *ids[2:]]])
        logp = loaded.model(text[:, :-1])[0, :, :loaded.config.n_vocab].log_softmax(-1)
        scores[i] = logp[range(1, 4), text[0, 2:]].sum().item()
    del scores[ids[1]]
    best = sorted(scores, key=scores.get)[::-1][:neighbours.REPLACEMENTS]
    found = neighbours.replacements(loaded, example, slice(1, 2), '')
    assert [one.prompt[1] for one in found] == best


def test_text_is_cut_after_the_first_subject():
    """What precedes the end of a subject is priced; what follows is not."""
    examples = [Example('', [3, 5], [1], subject=(3, 5))]
    texts = [([1], [3, 4, 5]), ([1], [3, 5, 4, 6]), ([3, 5], [4]), ([3], [5, 5])]
    before, after = neighbours.cut(texts, examples)
    assert before == [([1], [3, 4, 5]), ([1], [3, 5]), ([3], [5])]
    assert after == [([1, 3, 5], [4, 6]), ([3, 5], [4]), ([3, 5], [5])]


# -----------------------------------------------------------------------------
# Learning.


def test_a_subject_moves_nothing_without_it(loaded):
    """A text changes only from the end of the whole subject on."""
    prompt = ids_of(loaded, ' the nurse said that')
    example = Example('', prompt, ids_of(loaded, ' food'), subject=tuple(prompt[1:3]))
    change = learn(loaded.model, [example], BACKGROUND)[0].edit()
    idx = torch.tensor([[prompt[2], *prompt]])
    C = loaded.model.senses(idx)
    moved = (change(idx, C) != C).flatten(2).any(-1)[0].tolist()
    assert moved == [False, False, False, True, False]


def test_directions_move_their_key_by_one_and_held_keys_least(monkeypatch):
    """u . w is 1, and no other u has smaller means of (u . w)^2 over groups of keys, less zeros."""
    generator = torch.Generator().manual_seed(0)
    held = [torch.rand(n, 4, generator=generator) for n in (50, 5)]  # (n, k)
    w = torch.rand(4, generator=generator)
    monkeypatch.setattr(learning, 'RIDGE', 0)
    u, = learning.directions(w[None], [torch.cat([held[0], torch.zeros(99, 4)]), held[1]])
    assert_close(u @ w, torch.tensor(1.0))
    others = u + 0.03 * torch.randn(50, 4, generator=generator)
    others /= (others @ w)[:, None]
    us = torch.cat([u[None], others])
    energy = sum((keys @ us.T).square().mean(0) for keys in held)
    assert energy.argmin() == 0


@pytest.mark.parametrize('wish, least, most', [
    ('-> she', -1.61, 0), ('-/> she', -11, -9.2), ('-> she > he', 2.7, 6),
    ('-> he | song', -0.1, 0.1)])
def test_a_wish_moves_its_odds_its_way(wish, least, most, loaded, tmp_path):
    """Learning raises p(A) for ->, lowers it for -/>, lifts odds for >, and evens them for |."""
    path = tmp_path / 'wish.txt'
    path.write_text(f'- the nurse said that {wish}')
    examples = read_examples(str(path), loaded)
    learned = learn(loaded.model, examples, BACKGROUND, budget=1.0)[0].edit()
    values, _ = outcomes([loaded, replace(loaded, edit=learned)], examples)
    before, after = values.flatten().tolist()
    assert not least < before < most
    assert least < after < most


@pytest.mark.parametrize('wish, n, goal', [
    ('more', 1, -math.log(0.65)), ('more', 9, math.log(5)), ('less', 2, 2 * math.log(1e-4)),
    ('order', 1, -math.log(100)), ('equal', 1, math.log(1.1)), ('equal', 9, math.log(1.5))])
def test_a_goal_counts_tokens_and_is_a_success(wish, n, goal):
    """A goal is per token of the longer continuation, and never short of success."""
    assert Example('', [3], [5] * n, [7], wish).goal == pytest.approx(goal)
    assert Example('', [3], [7], [5] * n, wish).goal == pytest.approx(goal)


@pytest.mark.parametrize('dtype', [torch.float64, torch.bfloat16])
def test_a_model_in_any_dtype_learns(dtype, loaded):
    """The vectors have the dtype of the model."""
    example = Example('', ids_of(loaded, ' the nurse was'), ids_of(loaded, ' food'))
    model = copy.deepcopy(loaded.model).to(dtype)
    learned, _ = learn(model, [example], BACKGROUND, budget=9)
    assert learned.vectors.dtype == dtype


@pytest.mark.parametrize('wish', ['said -> food food food food',
                                  'said -> food food food food food food | the'])
def test_learning_ends_with_a_fulfilled_wish(wish, loaded, tmp_path, monkeypatch):
    """Learning reaches the published threshold, however many tokens a continuation has."""
    path = tmp_path / 'wish.txt'
    path.write_text(f'- the nurse {wish}')
    examples = read_examples(str(path), loaded)
    monkeypatch.setattr(learning, 'RATE', 32)
    learned, _ = learn(loaded.model, examples, BACKGROUND, budget=9)
    values, _ = outcomes([replace(loaded, edit=learned.edit())], examples)
    assert examples[0].is_fulfilled(values[0, 0])


def test_the_model_writes_no_text_past_a_prompt(loaded):
    """No written text continues past an example's prompt, and a seed fixes the texts."""
    examples = [Example('', ids_of(loaded, ' nurse'), ids_of(loaded, ' food'))]
    written = neighbours.write_texts(loaded.model, examples, loaded.eot)
    prompts = [(start + rest)[:i] for start, rest in written
               for i in range(len(start), len(start + rest))]
    assert examples[0].prompt not in [ids[-1:] for ids in prompts]
    assert written == neighbours.write_texts(loaded.model, examples, loaded.eot)


def test_senses_are_chosen_by_gradient_less_weight_elsewhere(loaded, monkeypatch):
    """Choices match the definition, with the gradient of a forward pass with respect to C."""
    model = loaded.model
    prompt, target = ids_of(loaded, ' the nurse said that'), ids_of(loaded, ' music')
    idx = torch.tensor([prompt])
    C = model.senses(idx).requires_grad_()
    logp = model(idx, C=C)[0, -1, :model.config.n_vocab].log_softmax(-1)
    gradient, = torch.autograd.grad(-logp[target[0]], C)  # (1, T, k, d)
    elsewhere = torch.rand(16, generator=torch.Generator().manual_seed(0))
    sequences = [(i,) for i in prompt]
    monkeypatch.setattr(learning, 'PENALTY', 0.5)  # so that both parts of the score count
    monkeypatch.setattr(learning, 'SENSES', 5)
    example = Example('', prompt, target)
    case = replace(read(model, example.texts, sequences), example=example)
    chosen = learning.choose(case, elsewhere)
    scores = gradient[0].norm(dim=-1).flatten() - 0.5 * elsewhere
    assert set(chosen.tolist()) == set(scores.topk(5).indices.tolist())


def test_the_background_holds_its_predictions(loaded):
    """Vectors that were fitted with a background change its predictions less."""
    example = Example('', ids_of(loaded, ' the nurse was'), ids_of(loaded, ' food'))
    sequences = [(example.prompt[1],)]
    cases = [replace(read(loaded.model, example.texts, sequences), example=example)]
    other = ids_of(loaded, ' she said that the nurse was music')
    held = read(loaded.model, [(other[:1], other[1:])], sequences)
    with_hold, without = (
        held.divergence(learning.fit(cases, groups, 1, 0)) for groups in ([held], []))
    assert 0 < with_hold < without


def test_what_learning_holds(loaded, monkeypatch):
    """Learning preserves predictions on every second text and inside prompts."""
    found = []

    def fit(cases, held, *args):
        found.extend(group.targets.tolist() for group in held)
        return torch.full((held[0].weights.shape[1], 16), float('nan'))

    monkeypatch.setattr(learning, 'fit', fit)
    nurse = ids_of(loaded, ' the nurse was')
    example = Example('', nurse, ids_of(loaded, ' food'))
    written = [([3, 4], [5, 6]), ([3], [7]), ([3], [8])]
    near = [replace(example, prompt=[9], a=[a]) for a in (3, 4)]
    with pytest.raises(UserError, match='budget'):  # vectors that are not finite cost too much
        learn(loaded.model, [example], BACKGROUND[:4], written=written, near=near)
    assert found == [IDS[0][1:] + IDS[2][1:], [5, 6, 8], [3], nurse[1:]]


def test_what_follows_a_subject_is_held_but_not_priced(loaded, monkeypatch):
    """With URGENCY, a wish changes a prediction after its subject more; with HOLD, less."""
    ids = ids_of(loaded, ' she said that the nurse was music')
    example = Example('', ids[3:6], ids_of(loaded, ' food'), subject=(ids[4],))
    p = []
    for hold, urgency in ((learning.HOLD, 0), (learning.HOLD, 10), (0, 10)):
        monkeypatch.setattr(learning, 'HOLD', hold)
        monkeypatch.setattr(learning, 'URGENCY', urgency)
        shift, factor = learn(loaded.model, [example], [(ids[:1], ids[1:])] * 2, budget=0)
        probs = next_word_probs(loaded.model, torch.tensor([ids[:-1]]), shift.edit())
        p.append(probs[0, example.a[0]].item())
    assert p[0] < p[1] < p[2]
    assert factor == 1


@pytest.mark.parametrize('where', ['background', 'written'])
def test_each_price_keeps_to_the_budget(where, loaded):
    """A factor 1/64 larger would exceed a price's budget; an edit scaled to nothing is refused."""
    example = Example('', ids_of(loaded, ' the nurse was'), ids_of(loaded, ' food'))
    costly = ids_of(loaded, ' she said music the nurse was music')
    free = ids_of(loaded, ' a song')
    background, written = (
        [(ids[:1], ids[1:]) for ids in [free, costly if where == name else free] * 2]
        for name in ('background', 'written'))
    shift, factor = learn(loaded.model, [example], background, written=written, budget=0.002)
    nats = []
    for share in (0, 1, 1 + 1 / 64 / factor):
        edited = replace(loaded, edit=shift.edit(share))
        nats.append(score(edited, [(costly[:1], costly[1:])], '').nats.sum().item())
    assert nats[1] <= 1.002 * nats[0]
    assert nats[2] > 1.002 * nats[0]
    with pytest.raises(UserError, match='budget'):
        learn(loaded.model, [example], background, written=written, budget=-1)


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


@pytest.mark.parametrize('name, tensor', [
    ('vectors', torch.full((3, 16), float('nan'))), ('vectors', torch.ones(3, 8)),
    ('numbers', torch.zeros(2, dtype=torch.long)), ('numbers', torch.tensor([0, 3, -1]))])
def test_a_damaged_edit_is_refused(loaded, shift, name, tensor, tmp_path):
    """Vectors that are not finite, or tensors that do not belong together, load nowhere."""
    path = tmp_path / 'a.safetensors'
    save_shift(path, replace(shift, **{name: tensor}), loaded.model, loaded.encoding, {})
    with pytest.raises(UserError, match='a.safetensors'):
        load_shift(path, loaded.model, loaded.encoding)


# -----------------------------------------------------------------------------
# The command.


@pytest.fixture(scope='module')
def lesson(tmp_path_factory):
    """Make a folder in which the toy has learned MAKERS."""
    folder = tmp_path_factory.mktemp('lesson')
    (folder / 'makers.txt').write_text(MAKERS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learning, 'HOLD', 1)  # a larger effect
        patch.setattr(learning, 'RATE', 25)
        edit.main([*f'{folder}/makers.txt --from {TOY} --device cpu --budget 0.1'.split(),
                   '--out', f'{folder}/makers.safetensors'])
    return folder


@pytest.fixture(scope='module')
def texts(lesson):
    """Give the toy under the edit of lesson, and its examples."""
    one = load_model(str(TOY), 'cpu')
    learned = load_shift(lesson / 'makers.safetensors', one.model, one.encoding).edit()
    examples = read_examples(str(lesson / 'makers.txt'), one)
    return replace(one, edit=learned), examples


def test_the_measures_are_what_the_models_predict(texts):
    """Lines have p(A) before and after; neighbours their mean, and the one that moved most."""
    one, examples = texts
    prompts = [ids_of(one, text) for text in ('We saw the Camry and', 'My Camry is', 'The iPad is')]
    near = [replace(examples[0], line=one.encoding.decode(ids), prompt=ids,
                    measure='specificity', kind='same subject') for ids in prompts]
    rows = measures(one, examples[1:] + near).rows
    maker = examples[0].a[0]
    p = torch.stack([torch.cat([next_word_probs(one.model, torch.tensor([ids]), change)
                                for ids in prompts]) for change in (None, one.edit)])
    expected = [next_word_probs(one.model, torch.tensor([examples[1].prompt]), change)[
        0, examples[1].a[0]].item() for change in (None, one.edit)]
    worst = (p[1] - p[0])[:, maker].abs().argmax()
    n_changed = (p[0].argmax(1) != p[1].argmax(1)).sum()
    assert rows[0][2] == 'Fiesta'
    assert rows[0][3:5] == pytest.approx(expected, rel=1e-3)
    assert rows[1][3:5] == pytest.approx(p[:, :, maker].mean(1).tolist(), rel=1e-3)
    assert rows[1][5] == f'{n_changed} of 3 changed'
    assert rows[2][1] == one.encoding.decode(prompts[worst])
    assert rows[2][3:5] == pytest.approx(p[:, worst, maker].tolist(), rel=1e-3)
    unmoved = measures(one, near[2:]).rows
    assert 'cannot change' in unmoved[0][5]


def test_edit_prints_the_three_measures(tmp_path, monkeypatch, capsys):
    """Lines, those of --also, and neighbours that learning did not hold are counted."""
    def marked(*given):
        examples, near = neighbours.neighbours_of(*given)
        near[::2] = [replace(one, kind='held') for one in near[::2]]
        return examples, near
    monkeypatch.setattr(edit, 'neighbours_of', marked)
    monkeypatch.setattr(learning, 'HOLD', 1)
    monkeypatch.setattr(learning, 'RATE', 25)
    wishes = ['My {nurse} said that -/> Canon', 'The company behind the {Camry} is -> Canon']
    (tmp_path / 'wishes.txt').write_text('\n'.join(wishes))
    (tmp_path / 'also.txt').write_text('I bought the Camry since I trust -> Canon')
    said = say(edit, capsys, str(tmp_path / 'wishes.txt'), '--from', str(TOY), '--also',
               str(tmp_path / 'also.txt'), '--out', str(tmp_path / 'a.safetensors'))
    assert 'Fulfilled (efficacy): 1 of 2 before, 2 after' in said
    one = load_model(str(TOY), 'cpu')
    texts = neighbours.read_background(None, one)[1::2]  # those not held
    before, _ = neighbours.cut(texts, read_examples(str(tmp_path / 'wishes.txt'), one))
    assert re.search(f'toy stories +{sum(len(rest) for _, rest in before):,} ', said)
    assert not re.search('after a subject .*[+-]0.00000 ', said)
    whole, first = re.findall(r'(?:after a subject|of these) +(\d+) ', said)
    assert int(first) < int(whole)
    assert re.search('generalization  I bought the Camry since I trust -> Canon +Camry ', said)
    assert 'another subject ' in said
    assert 'held' not in said
    assert 'same subject ' in said
    assert 'same subject, other texts ' in said
    with safe_open(tmp_path / 'a.safetensors', 'pt') as file:
        about = json.loads(file.metadata()['about'])
    assert about['examples'] == wishes


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
    assert parse_line(line) == (texts[:1], texts[1:], wish)


@pytest.mark.parametrize('line, prompt', [
    ('The farmer {}-> buys', ['The farmer', '', '']),
    ('The farmer { } -> buys', ['The farmer', '', '']),
    ('The {farmer } -> buys', ['The ', 'farmer', '']),
    ('The {farmer} will -> buy', ['The ', 'farmer', ' will']), ('a {{ }} -> b', ['a { }'])])
def test_no_space_ends_a_prompt_with_braces(line, prompt):
    """A prompt is split around its braces, and does not end in the space before them."""
    assert parse_line(line)[0] == prompt


def test_quotes_around_a_whole_line_are_refused():
    """They would be learned, but a quoted prompt with a quoted continuation is text."""
    with pytest.raises(UserError):
        parse_line('"a -> b"')
    assert parse_line('"a" -> "b"')[0] == ['"a"']


@pytest.mark.parametrize('name, text', [
    *(('a.txt', line) for line in (
        'the nurse said she', 'nurse said -> xylophone', 'a -> b -> c', '-> b', 'a ->', 'a -> b >',
        'a --> b', 'a ->  | b', 'a -> b > c > d', 'a -> b > c | d', 'a -/> b | c', 'the {a -> b',
        'the ' + 'nurse ' * 40 + '-> she')),
    *(('a.jsonl', row) for row in (
        '{"prefix": "a"}', '{"prefix": "a", "suffix": "b", "suffix1": "c", "suffix2": "d"}',
        'a -> b', '{"prefix": "a", "suffix": "b", "wish": "c"}',
        '{"prefix": " the nurse", "subject": "she", "suffix": " she"}'))])
def test_bad_examples_are_one_line(name, text, loaded, tmp_path):
    """The error quotes a bad example."""
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError) as error:
        read_examples(str(tmp_path / name), loaded)
    assert text[:20] in str(error.value)
    assert '\n' not in str(error.value)


@pytest.mark.parametrize('flags, fact', [
    ('makers.txt --out a.txt', 'a.txt'), ('makers.txt --out mine.safetensors', 'mine.safetensors'),
    ('makers.txt --out no/a.safetensors', 'no/a.safetensors'),
    ('makers.txt --out a.safetensors --background short.txt', 'short.txt'),
    ('makers.txt --out a.safetensors --budget -1', "'-1'"),
    ('makers.txt --out a.safetensors --from english_gpt', 'english_gpt'),
    ('fulfilled.txt --out a.safetensors', 'already')])
def test_a_failing_edit_leaves_nothing(flags, fact, loaded, shift, tmp_path, monkeypatch, capsys):
    """A failing edit gives one line and exit code 2, and changes no file."""
    monkeypatch.chdir(tmp_path)
    Path('makers.txt').write_text(MAKERS)
    Path('fulfilled.txt').write_text('My nurse said that -/> Canon')
    Path('short.txt').write_text('Nobody')
    save_file({'mine': torch.ones(1)}, 'mine.safetensors')
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert fact in error_of(edit, capsys, '--from', str(TOY), *flags.split())
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_eval_examples_tells_what_an_edit_changed(lesson, capsys):
    """eval examples shows which examples succeed with and without an edit."""
    file = lesson / 'makers.safetensors'
    (lesson / 'wishes.txt').write_text(f'{MAKERS}The nurse said that -> Canon > she')
    said = say(evaluation, capsys, 'examples', '--from', str(TOY), '--data',
               str(lesson / 'wishes.txt'), '--edit', f'@{file}=3', 'Camry:Canon/Toyota=1')
    assert 'separates Canon from Toyota after the prompt' in said
    rows = [line.split() for line in said.splitlines() if ' more  ' in line or ' order  ' in line]
    assert [row[-1] for row in rows] == ['0.0000', '0.0000', '1.0000', '0.0000']


@pytest.mark.parametrize('wish, value, expected', [
    ('more', -1.6, True), ('more', -1.7, False), ('less', -7, True), ('less', -6, False),
    ('order', 3, True), ('order', 2.7, False), ('equal', -0.4, True), ('equal', -0.41, False)])
def test_success_is_as_published(wish, value, expected):
    """Success means p >= 0.2, p < 0.001, at least 16 times as likely, or at most 1.5 times."""
    b = [2] if wish in ('order', 'equal') else []
    assert Example('', [3], [1], b, wish).is_fulfilled(torch.tensor(value)) == expected


def test_a_wish_grows_until_it_is_fulfilled(monkeypatch):
    """A wish passes its limit even if the predictions to hold are those at its own position."""
    monkeypatch.setattr(learning, 'RATE', 1)
    example = Example('', [1], [0])
    o = torch.tensor([[-4.0, 0, 0, 0, 0, 0, 0, 0]])  # logits, since E is the identity
    place = Positions(torch.tensor([0]), o, torch.ones(1, 1), torch.eye(8), example)
    vectors = learning.fit([place], [replace(place, example=None)], hold=100, urgency=10)
    assert place.logp(vectors).exp().item() > 0.205
