"""Claims about the page of sample.py --html, in a headless Chromium: its numbers are PyTorch's."""

import copy
import itertools
import json
import lzma
import os
import random
import shutil
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlencode

import pytest
import torch
from helpers import ROOT, SHARED, VOCABULARY, World, error_of, say, toy_subject
from torch import Tensor

from rucksack import page as page_module
from rucksack import sample
from rucksack.edits import EDIT_FLAGS, PROMPT, make_edit, parse_edits, word_forms
from rucksack.loaded import Subject, count_parameters, load_subject
from rucksack.model import Backpack, Config
from rucksack.page import in_8_bits, rounded, write_page
from rucksack.paper import lists
from rucksack.senses import Edit, explain, next_word_probs, replace_word, scale_senses
from rucksack.tokenizer import encode, gpt2_tokenizer, load_tokenizer

WITHIN = 1e-4  # a probability of the page against PyTorch's


# -----------------------------------------------------------------------------
# A browser, and what a test does in it.


@pytest.fixture(scope='module')
def chromium():
    """A headless Chromium. Tests that need it skip where it or playwright is missing."""
    playwright = pytest.importorskip('playwright.sync_api')
    names = ('chromium', 'chromium-browser', 'google-chrome')
    installed = [name for name in names if shutil.which(name)]
    if not installed:
        pytest.skip('no Chromium: apt-get install chromium')
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=shutil.which(installed[0]))
        yield browser
        browser.close()


@contextmanager
def open_tab(chromium, **options):
    """A tab. By its end the page must have logged, thrown and fetched nothing."""
    complaints = []

    def check_request(request) -> None:
        is_local = request.url.startswith(('file:', 'data:', 'blob:', 'about:'))
        if not is_local:
            complaints.append(request.url)

    tab = chromium.new_page(**options)
    tab.set_default_timeout(120_000)
    tab.on('console', lambda message: complaints.append(message.text))
    tab.on('pageerror', lambda error: complaints.append(str(error)))
    tab.on('request', check_request)
    yield tab
    tab.close()
    assert complaints == []


@pytest.fixture
def tab(chromium):
    """An empty tab."""
    with open_tab(chromium) as tab:
        yield tab


@pytest.fixture(scope='module')
def toy_page(toy, tmp_path_factory) -> Path:
    """The page of the toy model, as sample.py --html writes it."""
    file = tmp_path_factory.mktemp('page') / 'toy.html'
    sample.main(['--from', str(toy / 'out' / 'toy'), '--html', str(file), '--device', 'cpu'])
    return file


@pytest.fixture
def toy_tab(tab, toy_page):
    """A tab with the page of the toy model."""
    load(tab, toy_page)
    return tab


@pytest.fixture(scope='module')
def shared_tab(chromium, toy_page):
    """The same for all tests that make no edits there, as loading takes a while."""
    with open_tab(chromium) as tab:
        load(tab, toy_page)
        yield tab


@pytest.fixture
def world(toy) -> World:
    """The toy in PyTorch, and the prompt that its page begins with."""
    return World(str(toy / 'out' / 'toy'))


def load(tab, page: Path, fragment: str = '') -> None:
    """Load a page, with a link's fragment, and wait until its model is ready."""
    tab.goto('about:blank')  # as a new fragment alone would not load the page again
    tab.goto(page.resolve().as_uri() + fragment)
    tab.evaluate('rucksack.ready')
    settle(tab)


def link(**parts) -> str:
    """The fragment of a link to a text, two words to compare and edits."""
    if 'edits' in parts:
        parts['edits'] = json.dumps(parts['edits'])
    return '#' + urlencode(parts)


def settle(tab) -> None:
    """Wait until the page has all answers that it asked its worker for, and has drawn them."""
    tab.wait_for_function('waiting.size === 0')


def call(tab, function: str, *args) -> object:
    """Call a function of the page; its result, or what its promise resolves to."""
    return tab.evaluate(f'args => {function}(...args)', list(args))


def press(tab, name: str) -> None:
    """Press the button of that name."""
    tab.get_by_role('button', name=name, exact=True).click()
    settle(tab)


def type_text(tab, text: str) -> None:
    """Type a text in place of the one in the page."""
    tab.fill('#text', text)
    settle(tab)


def open_token(tab, place: int) -> None:
    """Press the token at that place, so that the page shows its senses."""
    tab.locator('#tokens button').nth(place).click()
    settle(tab)


def open_word(tab, world: World) -> list[int | tuple[int, ...]]:
    """The forms of the word that the page shows; which word decides depends on the toy."""
    return word_forms(world.encoding, tab.text_content('#word'))


def first_slider(tab):
    """The slider of the sense that decides most."""
    return tab.locator('#cards input').first


def first_sense(tab) -> int:
    """The number of that sense."""
    return int(tab.locator('#cards article').first.get_attribute('data-sense'))


def turn_off(tab) -> None:
    """Press the off button of that sense."""
    tab.locator('#cards .slider button').first.click()
    settle(tab)


def shown(tab) -> list[float]:
    """The probabilities in the table of next words, under the edits of the page."""
    settle(tab)
    cells = tab.locator('#next tbody td:nth-of-type(3) data')
    return cells.evaluate_all('cells => cells.map(cell => Number(cell.value))')


def assert_shows(tab, probs: Tensor) -> None:
    """Assert that the page shows how likely the ten likeliest tokens of probs (V,) are."""
    assert shown(tab) == pytest.approx(probs.topk(10).values.tolist(), abs=WITHIN)


# -----------------------------------------------------------------------------
# Predictions, texts and tokens are PyTorch's.

PROMPTS = {
    'default': PROMPT,
    'a word': 'nurse',
    'nothing': '',
    'longer than block_size': 'the nurse said the nurse and the doctor ' * 12}

# Edits of the page, and the same as flags of sample.py.
EDITS = {
    'none': ({}, {}),
    'numbers': (
        {'scale': {'nurse:0,3-5': 0.25, '*:2': 1.5}},
        {'senses_scale': ['nurse:0,3-5=0.25', '*:2=1.5']}),
    'a sense twice': ({'scale': {'nurse:3,3': 0.25}}, {'senses_scale': ['nurse:3=0.25']}),
    'pair': (
        {'scale': {'nurse:she/he': 0.5}},
        {'senses_scale': ['nurse:she/he=0.5']}),
    'replacement in every word': (
        {'replace': [['*', 'she', 'he'], ['nurse', 'he', 'they']]},
        {'replace': ['*: she -> he', 'nurse: he -> they']}),
    'replacement': (
        {'scale': {'nurse:1': 0}, 'replace': [['nurse', 'she', 'he']]},
        {'senses_off': ['nurse:1'], 'replace': ['nurse: she -> he']})}


def edit_of(flags: dict[str, list[str]], world: World) -> Edit:
    """The edit that flags of sample.py ask for."""
    texts = dict.fromkeys(EDIT_FLAGS, []) | flags
    edit, _ = make_edit(parse_edits(texts), world.model, world.encoding)
    return edit


@pytest.mark.parametrize('prompt', PROMPTS.values(), ids=PROMPTS)
@pytest.mark.parametrize('edits, flags', EDITS.values(), ids=EDITS)
def test_the_page_predicts_what_pytorch_does(edits, flags, prompt, shared_tab, toy):
    """The ten likeliest tokens and their probabilities are PyTorch's, with and without edits."""
    world = World(str(toy / 'out' / 'toy'), prompt)
    probs = world.probs(edit_of(flags, world))
    found = call(shared_tab, 'ask', 'predict', {'string': prompt, 'edits': edits})
    tokens = [token for token, _ in found]
    values = [p for _, p in found]
    assert values == pytest.approx(probs.topk(10).values.tolist(), abs=WITHIN)
    by_token = {world.encoding.decode([v]): p for v, p in enumerate(probs.tolist())}
    assert [by_token[token] for token in tokens] == pytest.approx(values, abs=WITHIN)


@pytest.mark.parametrize('prompt', PROMPTS.values(), ids=PROMPTS)
def test_greedy_text_is_pytorchs(prompt, shared_tab, toy):
    """At temperature 0 the page writes what generate writes, under an edit and past block_size."""
    world = World(str(toy / 'out' / 'toy'), prompt)
    eot = world.encoding.eot_token
    edit = scale_senses(word_forms(world.encoding, 'nurse'), [0], 0.0)
    written = world.model.generate(world.idx, 100, 0.0, edit=edit, stop=eot)[0].tolist()
    settings = {'temperature': 0, 'edits': {'nurse:0': 0}}
    found = call(shared_tab, 'rucksack.generate', prompt, 100, settings)
    new = [v for v in written[len(world.ids):] if v != eot]
    assert found == prompt + world.encoding.decode(new)


def test_a_seed_fixes_the_text(shared_tab):
    """A seed writes the same text again, another seed another text."""
    first = call(shared_tab, 'rucksack.generate', 'The', 30, {'seed': 1})
    assert call(shared_tab, 'rucksack.generate', 'The', 30, {'seed': 1}) == first
    assert call(shared_tab, 'rucksack.generate', 'The', 30, {'seed': 2}) != first


@pytest.mark.parametrize('key, offending', [
    ('zebra:0', '“zebra”'), ('nurse:16', '“nurse:16”'), ('nurse', '“nurse”'),
    ('nurse:x', '“nurse:x”'), ('nurse:3,', '“nurse:3,”'), ('nurse: ', '“nurse: ”'),
    ('nurse:1,5-3', '“nurse:1,5-3”'), ('*:she/he', '“*:she/he”'), ('', '“”'),
    ('nurse:0-99', '“nurse:0-99”'), ('nurse:she/she', '“she/she”'), ('@x:0', '“@x”')])
def test_a_bad_key_of_an_edit_is_named(key, offending, shared_tab):
    """An unknown word, an unknown sense or a key of another form rejects with what is wrong."""
    script = 'key => rucksack.predict("The", {[key]: 0}).catch(error => error.message)'
    assert shared_tab.evaluate(script, key).startswith(offending)


@pytest.mark.parametrize('factor', ['0', None, 1e13])
def test_a_factor_that_is_no_number_is_named(factor, shared_tab):
    """Texts are no factors, and neither is what would overflow."""
    script = 'factor => rucksack.predict("The", {"nurse:0": factor}).catch(error => error.message)'
    assert shared_tab.evaluate(script, factor).startswith('“nurse:0” has the factor ')


@pytest.mark.parametrize('name, value', [
    ('n', '5'), ('n', -1), ('seed', '1'), ('temperature', -0.5), ('temperature', '0')])
def test_an_odd_setting_of_a_text_is_named(name, value, shared_tab):
    """Numbers are numbers, from 0 on."""
    script = """({n = 3, ...settings}) =>
        rucksack.generate("The", n, settings).catch(error => error.message)"""
    assert shared_tab.evaluate(script, {name: value}).startswith(f'{name} is ')


def test_a_text_is_continued_as_it_is(shared_tab):
    """A mark at its beginning stays, and null means no edits."""
    string = '\ufeffthe nurse'
    found = call(shared_tab, 'rucksack.generate', string, 1, {'edits': None})
    assert found.startswith(string)
    assert len(found) > len(string)


NASTY = {
    'nothing': '',
    'blank': ' ',
    'blanks': '   ',
    'white space': '\n\n  x\t\r\n y ',
    'apostrophes': "don't we'll I'M 'S it's",
    'numbers': '1234567 3.14 ½ ①',
    'Hebrew': 'שלום עליכם',
    'accent': 'café',
    'combining accents': 'n\u0303o\u0301',
    'emoji': '👩‍⚕️🙂 emoji🙂',
    'Japanese': '日本語のテキスト',
    'Unicode spaces': '\u00a0\u2003\u3000x\u0085y\ufeffz',
    'joiners': 'a\u200db\u200cc',
    'underscores': '_under_score__',
    'markup': '<|endoftext|> <script>alert(1)</script>',
    'a long word': 'x' * 300,
    'control characters': '\x00\x01\x7f',
    'punctuation': '…—“quotes”',
    'unusual case': 'İıẞß',
    'rare characters': '\U0001d54f\ud7ff'}


def lines_of_wikipedia(n: int) -> list[str]:
    """n lines drawn at random from 2,000 articles of Simple Wikipedia; none where it is missing."""
    file = SHARED / 'text' / 'simplewiki.jsonl.xz'
    if not file.exists():
        return []
    with lzma.open(file, 'rt', encoding='utf-8') as rows:
        articles = [json.loads(row)['text'] for row in itertools.islice(rows, 2000)]
    lines = [line for article in articles for line in article.split('\n')]
    return random.Random(0).sample(lines, n)


def small_subject(tokenizer: dict) -> Subject:
    """An untrained model, as small as can be, with a tokenizer."""
    encoding = load_tokenizer(tokenizer)
    config = Config(8, encoding.n_vocab, n_layer=1, n_head=1, n_embd=2, n_sense=1)
    model = Backpack(config).eval()
    return Subject('small', model, tokenizer)


@pytest.mark.slow
@pytest.mark.parametrize('merges', ['toy', 1000, 16384, None])
def test_tokens_are_tiktokens(merges, tab, toy, tmp_path):
    """Real and nasty lines have tiktoken's ids: in the toy's words, GPT-2's BPE, and that cut."""
    if merges is None and not VOCABULARY.is_dir():
        pytest.skip("GPT-2's vocabulary is not at hand")
    if merges == 'toy':
        subject = load_subject(str(toy / 'out' / 'toy'), 'cpu')
    else:
        subject = small_subject(gpt2_tokenizer(merges))
    lines = [*NASTY.values(), *lines_of_wikipedia(1000)]
    write_page(subject, '', tmp_path / 'page.html')
    load(tab, tmp_path / 'page.html')
    script = 'lines => Promise.all(lines.map(string => ask("encode", {string})))'
    assert tab.evaluate(script, lines) == [encode(subject.encoding, line) for line in lines]


# -----------------------------------------------------------------------------
# What the page shows.


def test_the_numbers_of_tokens_add_up_to_the_log_odds(tab, toy_page, world):
    """The numbers below the tokens sum to the log odds of the two words, under an edit too."""
    load(tab, toy_page, link(compare='she/they', edits={'scale': {'nurse:0': 0.5}}))
    logp = world.probs(scale_senses([world.id('nurse')], [0], 0.5)).log()
    log_odds = (logp[world.id('she')] - logp[world.id('they')]).item()
    texts = tab.locator('#tokens small').all_text_contents()
    numbers = [float(text.replace('−', '-')) for text in texts]
    rounding = 0.005 * (len(numbers) + 1)
    assert sum(numbers) == pytest.approx(log_odds, abs=rounding)
    legend = tab.text_content('#legend')
    assert f'{log_odds:+.2f}: the logit of'.replace('-', '−') in legend


@pytest.mark.parametrize('word', ['nurse', 'farmer'])
def test_cards_have_the_words_that_senses_move_most(word, shared_tab, world):
    """Each card has the six words that its sense raises most, and the six that it lowers most."""
    C = world.model.senses(torch.tensor(world.id(word)))  # (k, d)
    logits = (C @ world.E.T)[:, 256:]  # (k, words)
    cards = call(shared_tab, 'ask', 'cards', {'word': word})
    raised = [[logit for _, logit in card[0]] for card in cards]
    lowered = [[logit for _, logit in card[1]] for card in cards]
    most = logits.topk(6).values
    least = logits.topk(6, largest=False).values
    torch.testing.assert_close(torch.tensor(raised), most, atol=WITHIN, rtol=0)
    torch.testing.assert_close(torch.tensor(lowered), least, atol=WITHIN, rtol=0)


def test_the_page_opens_on_the_word_that_decides(toy_tab, world):
    """It shows the prompt, its unedited prediction, and the senses of the word that decides.

    That is the word with the sense that adds most to she or to he.
    """
    toward_she = world.E[world.id('she')] - world.E[world.id('he')]
    alpha, scores = explain(world.model, world.idx, toward_she)  # (1, T, k) each
    most = (alpha * scores).abs()[0].amax(-1)  # (T,)
    word = world.encoding.decode([world.ids[most.argmax()]])
    assert toy_tab.input_value('#text') == PROMPT
    assert toy_tab.text_content('#word') == word.strip()
    assert_shows(toy_tab, world.probs())


def test_in_8_bits_a_weight_moves_half_a_step():
    """Rounding to 8 bits moves no weight by more than half of its row's scale."""
    weights = torch.randn(50, 20, generator=torch.Generator().manual_seed(0))
    scale, whole = in_8_bits(weights)
    error = (scale[:, None] * whole - weights).abs().amax(1)  # (50,)
    assert (error <= 0.501 * scale).all()


def test_the_page_says_how_much_rounding_changes(monkeypatch):
    """How often the likeliest word is the same, and the median of the largest changes."""
    s = toy_subject(block_size=64)
    other = copy.deepcopy(s.model)
    torch.manual_seed(0)
    for p in other.parameters():
        p.data += 0.03 * torch.randn_like(p)
    monkeypatch.setattr(page_module, 'rounded', lambda model: other)
    same = []
    changes = []
    prompts = [prompt.format(noun) for noun in lists.NOUNS for prompt in lists.PROMPTS]
    for prompt in prompts[::2][:200]:
        idx = torch.tensor([s.encode(prompt)[-64:]])
        p = next_word_probs(s.model, idx)[0]
        q = next_word_probs(other, idx)[0]
        same.append(p.argmax() == q.argmax())
        changes.append((p - q).abs().max())
    share = sum(same) / 200
    said = page_module.agreement(s)
    assert 0 < share < 1
    assert f' {share:.1%}, ' in said
    assert f' {torch.stack(changes).median():.4f}.' in said


def test_a_larger_model_is_rounded(tab, tmp_path):
    """Above two million parameters, the page is PyTorch's model in 8 bits, and says so."""
    subject = toy_subject(k=4, n_embd=144, n_layer=12, block_size=32)
    n_params = count_parameters(subject.model)['total']
    assert n_params > 2e6
    page = tmp_path / 'page.html'
    assert 'in 8 bits. ' in write_page(subject, 'the nurse', page)
    assert page.stat().st_size < 1.4 * n_params + 1e5
    load(tab, page)
    assert 'in 8 bits. ' in tab.text_content('#model')
    assert_predicts(tab, rounded(subject.model), subject.encode('the nurse said'))


def test_a_transformer_has_no_senses(tab, tmp_path):
    """The page of a Transformer predicts as PyTorch does, and says that there are no senses."""
    subject = toy_subject(k=0)
    write_page(subject, 'the nurse', tmp_path / 'page.html')
    load(tab, tmp_path / 'page.html')
    assert_predicts(tab, subject.model, subject.encode('the nurse said'))
    assert 'has no senses' in tab.text_content('#legend')


@torch.no_grad()
def assert_predicts(tab, model: Backpack, ids: list[int]) -> None:
    """Assert that after "the nurse said", of these ids, the page predicts as a model does."""
    probs = model(torch.tensor([ids]))[0, -1].softmax(-1)
    found = call(tab, 'rucksack.predict', 'the nurse said')
    assert [p for _, p in found] == pytest.approx(probs.topk(10).values.tolist(), abs=WITHIN)


# -----------------------------------------------------------------------------
# Controls.


@pytest.mark.slow
@pytest.mark.parametrize('keys, weight', [
    (['0'], 0.0), (['0', '1'], 1.0), (['ArrowRight'], 1.05), (['ArrowUp'], 1.05),
    (['Shift+ArrowLeft'], 0.75), (['Shift+ArrowDown'], 0.75)])
def test_keys_move_a_slider(keys, weight, toy_tab, world):
    """0 and 1 jump, arrows move by 0.05, with shift by 0.25, and the prediction follows."""
    for key in keys:
        first_slider(toy_tab).press(key)
    edit = scale_senses(open_word(toy_tab, world), [first_sense(toy_tab)], weight)
    assert_shows(toy_tab, world.probs(edit))


@pytest.mark.slow
def test_a_sense_is_off_until_edits_are_undone(toy_tab, world):
    """The off button turns a sense off and says what it would add; all edits can be undone."""
    turn_off(toy_tab)
    edit = scale_senses(open_word(toy_tab, world), [first_sense(toy_tab)], 0.0)
    assert_shows(toy_tab, world.probs(edit))
    assert 'would add' in toy_tab.locator('.adds').first.text_content()
    press(toy_tab, 'Undo all edits')
    assert_shows(toy_tab, world.probs())


def off_at(j: int, l: int) -> Edit:
    """The edit that turns sense l off at position j alone."""
    def edit(idx: Tensor, C: Tensor) -> Tensor:
        C = C.clone()
        C[:, j, l] = 0
        return C
    return edit


@pytest.mark.slow
@pytest.mark.parametrize('scope', ['word', 'place', 'all'])
def test_a_slider_acts_on_its_scope(scope, toy_tab, toy):
    """It acts on a word wherever it stands, on one place of it, or on all words."""
    world = World(str(toy / 'out' / 'toy'), 'the nurse said that the nurse')
    place = world.ids.index(world.id('nurse'))
    type_text(toy_tab, 'the nurse said that the nurse')
    open_token(toy_tab, place)
    l = first_sense(toy_tab)
    toy_tab.select_option('#scope', scope)
    turn_off(toy_tab)
    edits = {
        'word': scale_senses(word_forms(world.encoding, 'nurse'), [l], 0.0),
        'place': off_at(place, l),
        'all': scale_senses(None, [l], 0.0)}
    assert_shows(toy_tab, world.probs(edits[scope]))


@pytest.fixture(scope='module')
def bpe_page(tmp_path_factory) -> Path:
    """The page of a tiny model with GPT-2's BPE, whose prompt has a no-break space."""
    file = tmp_path_factory.mktemp('page') / 'bpe.html'
    write_page(small_subject(gpt2_tokenizer(16384)), 'a \u00a0 b', file)
    return file


@pytest.mark.slow
@pytest.mark.parametrize('place', range(3))
def test_every_token_has_sliders_that_work(place, tab, bpe_page):
    """Also a space and a no-break space, which is a token."""
    load(tab, bpe_page)
    open_token(tab, place)
    token = tab.locator('#tokens button').nth(place).locator('bdi')
    assert token.text_content().strip() != ''
    turn_off(tab)
    assert tab.locator('#tokens .edited').count() >= 1
    assert tab.text_content('#said') == ''


@pytest.mark.slow
def test_a_slash_can_be_compared_and_linked_to(tab, bpe_page):
    """The link separates its two words by a space."""
    load(tab, bpe_page)
    tab.fill('#a', '/')
    tab.fill('#b', 'he')
    press(tab, 'Compare')
    load(tab, bpe_page, tab.evaluate('location.hash'))
    assert tab.text_content('#pair').startswith('/ ')


@pytest.mark.slow
def test_a_word_at_the_start_is_the_same_word(toy_tab, world, toy):
    """Its sliders are those of the word inside the text, as an edit of it has both forms."""
    type_text(toy_tab, 'The nurse. The')
    open_token(toy_tab, 0)
    l = first_sense(toy_tab)
    turn_off(toy_tab)
    own = World(str(toy / 'out' / 'toy'), 'The nurse. The')
    edit = scale_senses(word_forms(world.encoding, 'The'), [l], 0.0)
    assert_shows(toy_tab, own.probs(edit))
    open_token(toy_tab, 3)
    slider = toy_tab.locator(f'#cards article[data-sense="{l}"] output')
    assert slider.text_content() == '0.00'


@pytest.mark.slow
def test_a_word_is_not_compared_with_itself(toy_tab):
    """It is said, and the two words stay."""
    before = toy_tab.text_content('#pair')
    toy_tab.fill('#b', toy_tab.input_value('#a'))
    press(toy_tab, 'Compare')
    assert 'two different words' in toy_tab.text_content('#said')
    assert toy_tab.text_content('#pair') == before


@pytest.mark.slow
def test_weights_that_cannot_be_read_are_said(tab, toy_page, tmp_path):
    """The line that said "Loading" says what is wrong, and no control can be used."""
    text = toy_page.read_text(encoding='utf-8')
    start = text.index('id="weights">') + len('id="weights">')
    damaged = tmp_path / 'damaged.html'
    damaged.write_text(text[:start] + '!' + text[start:], encoding='utf-8')
    tab.goto(damaged.as_uri())
    tab.wait_for_function("document.getElementById('hint').textContent.startsWith('Cannot run')")
    assert tab.locator('main').get_attribute('inert') is not None


def replace_she_by_he(tab) -> None:
    """Give he what nurse gives she, by the form for that."""
    tab.click('#replace summary')
    tab.fill('#replace [name=word]', 'nurse')
    tab.fill('#replace [name=old]', 'she')
    tab.fill('#replace [name=now]', 'he')
    press(tab, 'Replace')


@pytest.mark.slow
def test_a_word_can_be_replaced_and_put_back(toy_tab, world):
    """The form gives one word what a word gave another; a button undoes that."""
    replace_she_by_he(toy_tab)
    nurse = word_forms(world.encoding, 'nurse')
    edit = replace_word(world.model, nurse, world.id('she'), world.id('he'))
    assert_shows(toy_tab, world.probs(edit))
    toy_tab.click('#replaced button')
    assert_shows(toy_tab, world.probs())
    assert 'edits' not in toy_tab.evaluate('location.hash')


@pytest.mark.slow
def test_the_form_proposes_an_edit_of_the_chosen_word(toy_tab, world):
    """Untouched, it gives he what the chosen word gave she."""
    toy_tab.click('#tokens button:has-text("nurse")')
    toy_tab.click('#replace summary')
    toy_tab.wait_for_function("document.querySelector('#replace [name=word]').value === 'nurse'")
    press(toy_tab, 'Replace')
    nurse = word_forms(world.encoding, 'nurse')
    edit = replace_word(world.model, nurse, world.id('she'), world.id('he'))
    assert_shows(toy_tab, world.probs(edit))


@pytest.mark.slow
def test_an_error_is_shown_below_its_form(toy_tab):
    """A word that the form cannot take is named right below the form, not elsewhere."""
    toy_tab.click('#replace summary')
    toy_tab.fill('#replace [name=old]', 'zebra')
    press(toy_tab, 'Replace')
    assert '“zebra” is not one token' in toy_tab.text_content('#replace form + #said')


@pytest.mark.slow
def test_the_link_brings_everything_back(toy_tab, toy_page, world):
    """The address holds the edits, the two words and the text, so that it opens the same page."""
    scaled_word = open_word(toy_tab, world)
    first_slider(toy_tab).press('0')
    l = first_sense(toy_tab)
    replace_she_by_he(toy_tab)
    toy_tab.fill('#a', 'they')
    press(toy_tab, 'Compare')
    load(toy_tab, toy_page, toy_tab.evaluate('location.hash'))
    nurse = word_forms(world.encoding, 'nurse')
    scaled = scale_senses(scaled_word, [l], 0.0)
    replaced = replace_word(world.model, nurse, world.id('she'), world.id('he'))
    assert_shows(toy_tab, world.probs(scaled, replaced))
    assert toy_tab.text_content('#pair').startswith('they ')
    assert toy_tab.input_value('#text') == PROMPT


@pytest.mark.slow
def test_a_bad_link_is_named_and_keeps_its_text(tab, toy_page):
    """A link with unknown words says which; its text is in the page. A good one says nothing."""
    edits = {'scale': {'zebra:0': 0}}
    load(tab, toy_page, link(text='the nurse', compare='a/yak', edits=edits))
    assert 'zebra' in tab.text_content('#said')
    assert 'yak' in tab.text_content('#said')
    assert tab.input_value('#text') == 'the nurse'
    tab.evaluate("location.hash = 'compare=he+she'")
    tab.wait_for_function("document.getElementById('pair').textContent.startsWith('he ')")
    settle(tab)
    assert tab.text_content('#said') == ''
    assert tab.input_value('#text') == PROMPT


@pytest.mark.slow
def test_it_writes_before_and_after_edits(tab, toy_page):
    """It writes two texts with the same random numbers: of the model as it was, and edited."""
    load(tab, toy_page, link(edits={'scale': {'nurse:0': 0}}))
    tab.click('#write summary')
    press(tab, 'Write')
    before, now = tab.locator('#written p').all_text_contents()
    settings = {'temperature': 0.8, 'seed': 0}
    assert before == call(tab, 'rucksack.generate', PROMPT, 40, settings)
    assert len(before) > 40
    edited = settings | {'edits': {'nurse:0': 0}}
    assert now == call(tab, 'rucksack.generate', PROMPT, 40, edited)


def look_up(tab, word: str) -> None:
    """Look a word up by the form for that."""
    tab.fill('#look input', word)
    press(tab, 'Look up')


@pytest.mark.slow
def test_any_word_can_be_looked_up(toy_tab):
    """A word that is not in the text shows its senses; an unknown one is named."""
    look_up(toy_tab, 'farmer')
    assert toy_tab.text_content('#word') == 'farmer'
    assert toy_tab.locator('#cards article').count() == 16
    look_up(toy_tab, 'zebra')
    assert '“zebra” is not one token' in toy_tab.text_content('#said')


# -----------------------------------------------------------------------------
# Text stays text.

N_SCRIPTS = 3  # that are in the page when it has started


@pytest.mark.slow
@pytest.mark.parametrize('text', NASTY.values(), ids=NASTY)
def test_any_text_can_be_typed(text, shared_tab, world):
    """Tokens and ten words follow markup, blanks, other scripts and nothing; no script gets in."""
    type_text(shared_tab, text)
    ids = encode(world.encoding, shared_tab.input_value('#text')) or [world.encoding.eot_token]
    n_read = min(len(ids), world.model.config.block_size)
    assert shared_tab.locator('#tokens button').count() == n_read
    assert shared_tab.locator('#next tbody tr').count() == 10
    assert shared_tab.locator('script').count() == N_SCRIPTS


@pytest.mark.slow
def test_a_long_text_loses_its_beginning(shared_tab, world):
    """Of 10,000 words the page takes the last block_size tokens, and says how many it left out."""
    text = 'nurse said ' * 5000
    type_text(shared_tab, text)
    dropped = len(world.encoding.encode(text)) - world.model.config.block_size
    assert f'its first {dropped:,} tokens are left out' in shared_tab.text_content('#legend')


@pytest.mark.slow
def test_markup_in_a_command_stays_text(out, capsys, tab):
    """Markup in --start and in a file's name is text in the page."""
    Path('x<').mkdir()
    name = 'x</script>.pt'
    Path(name).symlink_to(Path('out/toy/ckpt.pt').resolve())
    markup = '<script>document.body.innerHTML = "gone"</script></script><b>"&amp;\' the nurse'
    say(sample, capsys, '--html', 'page.html', '--start', markup, '--from', name)
    load(tab, Path('page.html'))
    world = World(prompt=markup)
    assert tab.input_value('#text') == world.encoding.decode(world.ids)
    assert name in tab.text_content('#model')
    assert tab.locator('script').count() == N_SCRIPTS


# -----------------------------------------------------------------------------
# Layouts.

# The first is that of the picture in README.md, tests/page.png. To draw it anew:
# SCREENSHOTS=tests python -m pytest -m "" tests/test_page.py -k page-light
SIZES = {'page': (1280, 790), 'huge': (1920, 1080), 'phone': (390, 844), 'landscape': (844, 390),
         'narrow': (320, 640)}

BOXES = '''
    elements => elements.filter(element => element.checkVisibility()).map(element => {
        const {left, top, right, bottom} = element.getBoundingClientRect();
        return {html: element.outerHTML, left, top, right, bottom};
    })'''

HAS_NO_NAME = '''
    elements => elements.filter(element => {
        const isLabelled = element.labels && element.labels.length > 0;
        return !element.ariaLabel && !isLabelled && element.textContent.trim() === "";
    }).map(element => element.outerHTML)'''


@pytest.fixture(scope='module')
def english_page(tmp_path_factory) -> Path:
    """The page of the bundled model."""
    file = tmp_path_factory.mktemp('page') / 'english.html'
    write_page(load_subject('english', 'cpu'), PROMPT, file)
    return file


def overlap(one: dict, other: dict) -> float:
    """How many pixels two boxes overlap, in the direction in which they overlap less."""
    width = min(one['right'], other['right']) - max(one['left'], other['left'])
    height = min(one['bottom'], other['bottom']) - max(one['top'], other['top'])
    return min(width, height)


@pytest.mark.slow
@pytest.mark.parametrize('scheme', ['light', 'dark'])
@pytest.mark.parametrize('size', SIZES)
def test_nothing_overlaps(size, scheme, chromium, english_page):
    """Controls and headings lie apart, inside the window. A folder in SCREENSHOTS gets pictures."""
    width, height = SIZES[size]
    viewport = {'width': width, 'height': height}
    is_phone = min(width, height) < 500
    with open_tab(chromium, viewport=viewport, is_mobile=is_phone, color_scheme=scheme) as tab:
        load(tab, english_page, link(edits={'scale': {'nurse:10': 0}}))
        if 'SCREENSHOTS' in os.environ:
            suffix = {'light': '.png', 'dark': '_dark.png'}
            tab.screenshot(path=ROOT / os.environ['SCREENSHOTS'] / f'{size}{suffix[scheme]}')
        assert tab.evaluate('document.scrollingElement.scrollWidth') <= width
        boxes = tab.locator('main button, main input, main h3, #text').evaluate_all(BOXES)
    outside = [box['html'] for box in boxes if box['left'] < -1 or box['right'] > width + 1]
    assert outside == []
    overlapping = [(one['html'], other['html']) for one, other in itertools.combinations(boxes, 2)
                   if overlap(one, other) >= 2]
    assert overlapping == []


@pytest.mark.slow
def test_every_control_has_a_name(shared_tab):
    """Buttons and fields have a label or a text, for people who do not see the page."""
    controls = shared_tab.locator('button, input, select, textarea')
    assert controls.evaluate_all(HAS_NO_NAME) == []


# -----------------------------------------------------------------------------
# The file.


def test_a_full_disk_leaves_the_old_page(out, capsys, monkeypatch):
    """A page is replaced whole or not at all."""
    page = Path('page.html')
    say(sample, capsys, '--html', 'page.html')
    first = page.read_bytes()
    say(sample, capsys, '--html', 'page.html', '--start', 'nurse')
    second = page.read_bytes()
    assert second != first

    def fill_disk(path, text, **how):
        path.write_bytes(text[:100].encode())
        raise OSError(28, 'No space left on device')

    monkeypatch.setattr(Path, 'write_text', fill_disk)
    assert 'No space left' in error_of(sample, capsys, '--html', 'page.html')
    assert page.read_bytes() == second
    assert sorted(path.name for path in Path().iterdir()) == ['out', 'page.html']


def test_a_model_too_large_is_refused(out, capsys, monkeypatch):
    """A model of more parameters than a page takes is named, and no page is written."""
    monkeypatch.setattr(page_module, 'LARGEST', 1000)
    assert 'out/toy' in error_of(sample, capsys, '--html', 'page.html', '--from', 'out/toy')
    assert [path.name for path in Path().iterdir()] == ['out']
