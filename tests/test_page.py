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
from helpers import ROOT, SHARED, VOCABULARY, World, error_of, say
from torch import Tensor

from rucksack import page as page_module
from rucksack import sample
from rucksack.edits import find_senses, make_edit, parse_lines
from rucksack.loaded import LoadedModel, load_model
from rucksack.model import Backpack, Config
from rucksack.page import WRONG_PREDICTIONS, in_8_bits, write_page
from rucksack.senses import Edit, explain, scale_senses
from rucksack.tokenizer import encode, gpt2_tokenizer, load_tokenizer
from rucksack.weights import count_parameters
from rucksack.words import PROMPT, edit_targets

WITHIN = 1e-4  # tolerance for probabilities


@pytest.fixture(scope='module')
def chromium():
    """Start a headless Chromium. Tests that need it skip where it or playwright is missing."""
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
    """Open a tab whose page must log, throw and fetch nothing."""
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
    """Open an empty tab."""
    with open_tab(chromium) as tab:
        yield tab


@pytest.fixture(scope='module')
def toy_page(toy, tmp_path_factory) -> Path:
    """Write the page of the toy model with sample.py --html."""
    file = tmp_path_factory.mktemp('page') / 'toy.html'
    sample.main(['--from', str(toy / 'out' / 'toy'), '--html', str(file), '--device', 'cpu'])
    return file


@pytest.fixture
def toy_tab(tab, toy_page):
    """Open a tab with the page of the toy model."""
    load(tab, toy_page)
    return tab


@pytest.fixture(scope='module')
def shared_tab(chromium, toy_page):
    """Share one tab between all tests that make no edits in it, because loading takes a while."""
    with open_tab(chromium) as tab:
        load(tab, toy_page)
        yield tab


@pytest.fixture(scope='module')
def english_page(tmp_path_factory) -> Path:
    """Write the page of the bundled model."""
    file = tmp_path_factory.mktemp('page') / 'english.html'
    write_page(load_model('english', 'cpu'), PROMPT, file)
    return file


def toy_world(toy, prompt: str = PROMPT) -> World:
    """Load the toy in PyTorch, with a prompt."""
    return World(str(toy / 'out' / 'toy'), prompt)


@pytest.fixture
def world(toy) -> World:
    """Load the toy in PyTorch, with the prompt that its page begins with."""
    return toy_world(toy)


def load(tab, page: Path, fragment: str = '') -> None:
    """Load a page, with a link's fragment, and wait until its model is ready."""
    tab.goto('about:blank')  # a new fragment alone would not reload the page
    tab.goto(page.resolve().as_uri() + fragment)
    tab.evaluate('rucksack.ready')
    settle(tab)


def link(text: str, *lines: str, **choices: str) -> str:
    """Make the fragment of a link to a text, edits, and what is chosen on the page."""
    return '#' + urlencode({'text': text, 'edit': '\n'.join(lines)} | choices)


def numbers(tab, selector: str) -> list[float]:
    """Read the unrounded numbers that an element shows."""
    return tab.locator(f'{selector} data').evaluate_all('cells => cells.map(x => Number(x.value))')


def settle(tab) -> None:
    """Wait until the worker has answered all questions, and the page has drawn the answers."""
    tab.wait_for_function('waiting.length === 0')


def predict(tab, prompt: str, lines: list[str]) -> list[list]:
    """Return the next tokens that the page predicts, with their probabilities."""
    return tab.evaluate('args => rucksack.predict(...args)', [prompt, lines])


def press(tab, name: str) -> None:
    """Press the button of that name."""
    tab.get_by_role('button', name=name, exact=True).click()
    settle(tab)


def type_text(tab, text: str) -> None:
    """Type a text in place of the one on the page."""
    tab.fill('#text', text)
    settle(tab)


def open_token(tab, place: int) -> None:
    """Press the token at that place, so that the page shows its senses."""
    tab.locator('#tokens button').nth(place).click()
    settle(tab)


def assert_shows(tab, probs: Tensor) -> None:
    """Assert that the page shows how likely the ten likeliest tokens of probs (V,) are."""
    settle(tab)
    shown = numbers(tab, '#next td:nth-of-type(3)')
    assert shown == pytest.approx(probs.topk(10).values.tolist(), abs=WITHIN)


def write(tab, **settings) -> str:
    """Return what the page writes after a prompt."""
    standard = {'string': 'The', 'n': 30, 'seed': 0, 'temperature': 0.8, 'lines': []}
    script = 'settings => [...generate(settings)].at(-1) ?? ""'
    return tab.workers[0].evaluate(script, standard | settings)


def apply(tab, *lines: str) -> None:
    """Type edits into the box for them, and apply them."""
    tab.fill('#lines', '\n'.join(lines))
    press(tab, 'Apply')


def rounded(model: Backpack) -> Backpack:
    """Copy a model and round its matrices to 8 bits per weight, as in the page."""
    model = copy.deepcopy(model)
    for p in model.parameters():
        if p.dim() == 2:
            scale, whole = in_8_bits(p.data)
            p.data = scale[:, None] * whole
    return model


PROMPTS = {
    'default': PROMPT, 'a word': 'nurse', 'nothing': '',
    'longer than block_size': 'the nurse said the nurse and the doctor ' * 12}

EDITS = {
    'none': [],
    'numbers': ['nurse:0,3-5=0.25', '*:2=1.5'],
    'off twice': ['nurse,teacher:3,3', 'nurse:3=0.25'],
    'a word twice': ['nurse,nurse:0-3=2'],
    'pair': ['nurse:she/he=0.5'],
    'replacements in order': ['*: she -> he', 'nurse: he -> they'],
    'a replacement and a scaling': ['nurse: she -> he', 'nurse:1=-2']}


def edit_of(lines: list[str], world: World) -> Edit:
    """Make the edit that sample.py makes of the same lines."""
    edit, _ = make_edit(parse_lines(lines), world.model, world.encoding, [world.idx])
    return edit


@pytest.mark.parametrize('prompt', PROMPTS.values(), ids=PROMPTS)
@pytest.mark.parametrize('lines', EDITS.values(), ids=EDITS)
def test_the_page_predicts_what_pytorch_does(lines, prompt, shared_tab, toy):
    """The ten likeliest tokens and their probabilities are PyTorch's, under the same edits."""
    world = toy_world(toy, prompt)
    probs = world.probs(edit_of(lines, world))
    found = predict(shared_tab, prompt, lines)
    values = [p for _, p in found]
    assert values == pytest.approx(probs.topk(10).values.tolist(), abs=WITHIN)
    by_token = {world.encoding.decode([v]): p for v, p in enumerate(probs.tolist())}
    assert [by_token[token] for token, _ in found] == pytest.approx(values, abs=WITHIN)


@pytest.mark.parametrize('prompt, where', [
    (PROMPTS['longer than block_size'], 'after this text'), ('The', 'at weight 1')])
def test_the_page_says_which_sense_separates_a_pair(prompt, where, tab, toy_page, toy):
    """The page names sample.py's sense: after the text or, without the word, at weight 1."""
    load(tab, toy_page, link(prompt, 'nurse:she/he'))
    world = toy_world(toy, prompt)
    change, = parse_lines(['nurse:she/he'])
    _, (sense,), _ = find_senses(change, world.model, world.encoding, [world.idx])
    said = f'Sense {sense} of nurse most separates she/he {where}'
    assert tab.text_content('#notes').startswith(said)


@torch.no_grad()
def test_a_larger_model_is_rounded(tab, english_page):
    """The bundled model's page says that it is in 8 bits, and equals PyTorch in 8 bits."""
    load(tab, english_page)
    assert 'in 8 bits' in tab.text_content('#model')
    assert english_page.stat().st_size < 2 * count_parameters(World('english').model)['total']
    world = World('english', 'The MacBook was made by')
    model = rounded(world.model)
    lines = ['MacBook: Apple -> HP', 'MacBook:0-15=3']
    C = edit_of(lines, world)(world.idx, model.senses(world.idx))
    probs = model(world.idx, C=C)[0, -1, :len(world.E)].softmax(-1)
    found = predict(tab, 'The MacBook was made by', lines)
    assert [p for _, p in found] == pytest.approx(probs.topk(10).values.tolist(), abs=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize('wrong', WRONG_PREDICTIONS, ids=lambda wrong: wrong['edit'])
def test_a_wrong_prediction_is_repaired(wrong, tab, english_page):
    """The link shows the wrong word before and the right one now, and how far each one moved."""
    world = World('english', wrong['text'])
    world.model = rounded(world.model)
    edit = edit_of([wrong['edit']], world)
    before = world.probs()
    now = world.probs(edit)
    load(tab, english_page)
    tab.locator('#wrong a', has_text=wrong['text']).click()
    tab.wait_for_function('text => state.text === text', arg=wrong['text'])
    settle(tab)
    assert tab.locator('#pair bdi').all_text_contents() == [wrong['a'], wrong['b']]
    shown = numbers(tab, '#pair')
    assert [shown[0], shown[3]] == pytest.approx([before.max().item(), now.max().item()], abs=2e-3)
    moved = dict(text.split() for text in tab.locator('#most span').all_text_contents())
    points = 100 * (now - before)[[world.id(wrong['a']), world.id(wrong['b'])]]
    found = [float(moved[wrong[name]].replace('−', '-')) for name in ('a', 'b')]
    assert found == pytest.approx(points.tolist(), abs=0.3)


@torch.no_grad()
@pytest.mark.parametrize('line', ['nurse:0-15=-1', 'room:0-15=-1'])
def test_the_page_counts_changed_predictions(line, tab, toy_page, world):
    """The page says after how many tokens of the text an edit changes the likeliest next word."""
    load(tab, toy_page, link(PROMPT, line))
    C = world.model.senses(world.idx)
    before = world.model(world.idx, C=C)[0].argmax(-1)  # (T,)
    now = world.model(world.idx, C=edit_of([line], world)(world.idx, C))[0].argmax(-1)
    n_changed = (before != now).sum().item()
    said = f'the likeliest next word after {n_changed} of the {len(world.ids)} tokens'
    assert said in ' '.join(tab.text_content('#moved').split())


def test_an_edit_without_effect_is_named(toy_tab):
    """The page names an edited word that the text lacks, and shows no moves."""
    apply(toy_tab, 'guard:3')
    assert 'guard' in toy_tab.text_content('#notes')
    assert toy_tab.locator('#most span').count() == 0


def test_the_row_has_the_weights_of_the_sense_in_focus(toy_tab, world):
    """The row of weights shows alpha on each token for the sense whose card has the focus."""
    alpha, _ = explain(world.model, world.idx, world.E[0])  # (1, T, k)
    card = toy_tab.locator('#cards article').nth(2)
    card.locator('button').first.focus()
    sense = int(card.get_attribute('data-sense'))
    assert toy_tab.text_content('#sense') == f'sense {sense}'
    assert numbers(toy_tab, '#alpha') == pytest.approx(alpha[0, :, sense].tolist(), abs=WITHIN)


@pytest.mark.parametrize('prompt', PROMPTS.values(), ids=PROMPTS)
def test_greedy_text_is_pytorchs(prompt, shared_tab, toy):
    """At temperature 0 the page writes what generate writes, under an edit and past block_size."""
    world = toy_world(toy, prompt)
    eot = world.encoding.eot_token
    lines = ['nurse:she/he=-9']  # the prompt alone chooses the sense
    written = world.model.generate(
        world.idx, 100, 0.0, edit=edit_of(lines, world), stop=eot)[0].tolist()
    new = [v for v in written[len(world.ids):] if v != eot]
    found = write(shared_tab, string=prompt, n=100, temperature=0, lines=lines)
    assert found == world.encoding.decode(new)


@pytest.mark.parametrize('line, offending', [
    ('zebra:0', '“zebra”'), ('nurse:16', '16'), ('nurse', '“nurse”'), ('nurse:x', '“nurse:x”'),
    ('nurse:3,', '“nurse:3,”'), ('nurse:1,5-3', '“5-3”'), ('*:she/he', '“*:she/he”'),
    ('nurse,*:she/he', '“nurse,*:she/he” needs a word'),
    ('nurse:she/she', '“she/she”'), ('topic music', '“topic music” works in sample.py only'),
    ('@x', '“@x” works in sample.py only'),
    ('@x.safetensors=0.5', '“@x.safetensors=0.5” works in sample.py only')])
def test_a_line_of_an_edit_that_cannot_be_read_is_named(line, offending, shared_tab):
    """The error names a line with an unknown word, sense or form, or one only for sample.py."""
    script = 'line => rucksack.predict("The", [line]).catch(error => error.message)'
    assert offending in shared_tab.evaluate(script, line)


NASTY = [
    '', '   ', '\n\n  x\t\r\n y ', "don't we'll I'M 'S it's", '1234567 3.14 ½ ①', 'שלום עליכם',
    'n\u0303o\u0301', '👩‍⚕️🙂 emoji🙂', '日本語のテキスト', '\u00a0\u2003\u3000x\u0085y\ufeffz',
    'a\u200db\u200cc', '_under_score__', '<|endoftext|> <script>alert(1)</script>', 'x' * 300,
    '\x00\x01\x7f', '…—“quotes”', 'İıẞß', '\U0001d54f\ud7ff']


def lines_of_wikipedia(n: int) -> list[str]:
    """Draw n lines from 2,000 articles of Simple Wikipedia; none where it is missing."""
    file = SHARED / 'text' / 'simplewiki.jsonl.xz'
    if not file.exists():
        return []
    with lzma.open(file, 'rt', encoding='utf-8') as rows:
        articles = [json.loads(row)['text'] for row in itertools.islice(rows, 2000)]
    lines = [line for article in articles for line in article.split('\n')]
    return random.Random(0).sample(lines, n)


def small_loaded(tokenizer: dict) -> LoadedModel:
    """Make the smallest untrained model for a tokenizer."""
    encoding = load_tokenizer(tokenizer)
    config = Config(8, encoding.n_vocab, n_layer=1, n_head=1, n_embd=2, n_sense=1)
    model = Backpack(config).eval()
    return LoadedModel('small', model, tokenizer)


@pytest.mark.slow
@pytest.mark.parametrize('merges', ['toy', 1000, 16384, None])
def test_tokens_are_tiktokens(merges, tab, toy, tmp_path):
    """Real and nasty lines get tiktoken's ids, with the toy's words and with GPT-2's BPE."""
    if merges is None and not VOCABULARY.is_dir():
        pytest.skip("GPT-2's vocabulary is not at hand")
    if merges == 'toy':
        loaded = load_model(str(toy / 'out' / 'toy'), 'cpu')
    else:
        loaded = small_loaded(gpt2_tokenizer(merges))
    lines = [*NASTY, *lines_of_wikipedia(1000)]
    write_page(loaded, '', tmp_path / 'page.html')
    load(tab, tmp_path / 'page.html')
    script = 'lines => lines.map(line => tokenizer.encode(line))'
    found = tab.workers[0].evaluate(script, lines)
    assert found == [encode(loaded.encoding, line) for line in lines]


def test_the_numbers_of_tokens_add_up_to_the_log_odds(tab, toy_page, world):
    """The numbers below the tokens sum to the log odds of the two words, under an edit too."""
    load(tab, toy_page, link(PROMPT, 'nurse:0=0.5'))
    tab.fill('#b', 'they')
    press(tab, 'Compare')
    logp = world.probs(scale_senses([world.id('nurse')], [0], 0.5)).log()
    log_odds = (logp[world.id('she')] - logp[world.id('they')]).item()
    texts = tab.locator('#tokens small').all_text_contents()
    numbers = [float(text.replace('−', '-')) for text in texts]
    rounding = 0.005 * (len(numbers) + 1)
    assert sum(numbers) == pytest.approx(log_odds, abs=rounding)
    assert f'{log_odds:+.2f}'.replace('-', '−') in tab.text_content('#legend')


NUMBERS_OF_CARDS = '''
    cards => cards.map(card => {
        const cells = [...card.querySelectorAll('td:nth-child(even)')];
        return cells.map(cell => Number(cell.textContent.replace('−', '-')));
    })'''


def test_cards_have_the_words_that_senses_move_most(toy_tab, world):
    """Each card has the six words that its sense raises most, and the six that it lowers most."""
    open_token(toy_tab, 2)
    C = world.model.senses(world.idx[0, 2])  # (k, d)
    logits = (C @ world.E.T)[:, 256:]  # (k, words)
    rows = torch.stack([logits.topk(6).values, logits.topk(6, largest=False).values], -1)
    cards = toy_tab.locator('#cards article')
    senses = cards.evaluate_all('cards => cards.map(card => Number(card.dataset.sense))')
    found = torch.tensor(cards.evaluate_all(NUMBERS_OF_CARDS))
    torch.testing.assert_close(found, rows.flatten(1)[senses], atol=0.006, rtol=0)


def test_the_page_opens_on_the_word_that_decides(toy_tab, world):
    """The page opens unedited, on the word whose sense adds most to she or to he."""
    toward_she = world.E[world.id('she')] - world.E[world.id('he')]
    alpha, scores = explain(world.model, world.idx, toward_she)  # (1, T, k) each
    most = (alpha * scores).abs()[0].amax(-1)  # (T,)
    word = world.encoding.decode([world.ids[most.argmax()]])
    assert toy_tab.input_value('#text') == PROMPT
    assert toy_tab.text_content('#word') == word.strip()
    assert_shows(toy_tab, world.probs())


@pytest.mark.parametrize('prompt', [
    PROMPT, 'He went to Paris, the capital of', 'The United States of America'])
def test_the_page_compares_likely_words(prompt, tab, english_page):
    """The page compares she with he if both are in the ten likeliest, or else the two likeliest."""
    load(tab, english_page, link(prompt))
    world = World('english', prompt)
    likely = [word for word in map(str.strip, world.top(world.probs(), 10)[::2]) if word.isalpha()]
    pair = ['she', 'he'] if {'she', 'he'} <= set(likely) else likely[:2]
    assert [tab.input_value('#a'), tab.input_value('#b')] == pair


def test_the_page_compares_words_without_spaces(tab, tmp_path):
    """In a script without spaces, tokens are words, and can be looked up as they are shown."""
    loaded = small_loaded({'name': 'gpt2', 'merges': ['ä ¸', 'ä¸ Ń', 'æ ĸ', 'æĸ ĩ']})
    write_page(loaded, '中文', tmp_path / 'page.html')
    load(tab, tmp_path / 'page.html')
    press(tab, 'Compare')
    assert {tab.input_value('#a'), tab.input_value('#b')} == {'中', '文'}
    assert tab.text_content('#said') == ''
    assert 'NaN' not in tab.text_content('#legend')


@pytest.mark.slow
def test_a_slider_writes_its_line(toy_tab, world):
    """A slider edits its word wherever it occurs, and all edits can be undone."""
    card = toy_tab.locator('#cards article').first
    line = f'{toy_tab.text_content("#word")}:{card.get_attribute("data-sense")}'
    card.locator('input').press('ArrowRight')
    settle(toy_tab)
    assert toy_tab.input_value('#lines') == f'{line}=1.01'
    top = card.locator('input').evaluate('slider => slider.offsetTop')
    card.locator('.off').click()
    settle(toy_tab)
    assert card.locator('input').evaluate('slider => slider.offsetTop') == top
    assert toy_tab.input_value('#lines') == line
    assert_shows(toy_tab, world.probs(edit_of([line], world)))
    press(toy_tab, 'Undo all edits')
    assert_shows(toy_tab, world.probs())


@pytest.mark.slow
@pytest.mark.parametrize('line, moved', [
    ('nurse:3 = 0.5', ['nurse:3=2']),
    ('nurse,guard:2-3=0.5', ['nurse,guard:2-3=0.5', 'nurse:3=4']),
    ('*:3=0', ['*:3=0', 'nurse:3=2'])])
def test_a_slider_shows_all_that_scales_its_sense(line, moved, tab, toy_page, world):
    """A slider moved to 2 writes the line after which the sense is doubled, if there is one."""
    load(tab, toy_page, link(PROMPT, line))
    open_token(tab, 2)
    card = tab.locator('#cards article[data-sense="3"]')
    assert card.locator('output').text_content() == ('0.00' if line == '*:3=0' else '0.50')
    card.locator('input').press('End')
    assert_shows(tab, world.probs(edit_of(moved, world)))
    assert tab.input_value('#lines').split('\n') == moved


@pytest.mark.slow
def test_a_token_chosen_by_keyboard_keeps_the_focus(toy_tab):
    """Tab and Enter move from token to token, although the page redraws them."""
    toy_tab.focus('#text')
    for key in ['Tab', 'Enter', 'Tab', 'Enter']:
        toy_tab.keyboard.press(key)
        settle(toy_tab)
    chosen = toy_tab.locator('#tokens button:nth-child(2)')
    assert chosen.get_attribute('aria-pressed') == 'true'
    assert chosen.evaluate('button => button === document.activeElement')


@pytest.mark.slow
def test_a_word_at_the_start_is_the_same_word(tab, toy_page, toy):
    """A word at the start has the sliders of the word inside a text: an edit covers both forms."""
    load(tab, toy_page, link('The nurse. The', 'The:3'))
    world = toy_world(toy, 'The nurse. The')
    edit = scale_senses(edit_targets(world.encoding, 'The'), [3], 0.0)
    assert_shows(tab, world.probs(edit))
    for place in (0, 3):
        open_token(tab, place)
        assert tab.locator('#cards article[data-sense="3"] input').input_value() == '0'


@pytest.mark.slow
def test_lines_are_edits_and_the_link_brings_all_back(toy_tab, toy_page, toy):
    """A line that cannot be read is named and stays in the box; it changes no prediction."""
    type_text(toy_tab, 'The nurse & the guard #1')
    world = toy_world(toy, 'The nurse & the guard #1')
    lines = ['nurse: she -> he', 'nurse:she/he=0.5', 'guard:3']
    apply(toy_tab, *lines)
    address = toy_tab.evaluate('location.hash')
    apply(toy_tab, *lines, 'zebra:1')
    assert '“zebra”' in toy_tab.text_content('#said')
    assert 'previous edits still apply' in toy_tab.text_content('#said')
    assert toy_tab.input_value('#lines').endswith('zebra:1')
    assert_shows(toy_tab, world.probs(edit_of(lines, world)))
    load(toy_tab, toy_page, address)
    assert_shows(toy_tab, world.probs(edit_of(lines, world)))
    assert toy_tab.input_value('#text') == 'The nurse & the guard #1'
    assert toy_tab.input_value('#lines') == '\n'.join(lines)


@pytest.mark.slow
def test_the_link_brings_back_what_was_chosen(toy_tab, toy_page):
    """The address holds the two words, the token and the sense."""
    toy_tab.fill('#b', 'they')
    press(toy_tab, 'Compare')
    open_token(toy_tab, 1)
    toy_tab.locator('#cards article').nth(2).locator('button').first.click()
    script = '["b", "word", "sense"].map(id => byId(id).value ?? byId(id).textContent)'
    chosen = toy_tab.evaluate(script)
    load(toy_tab, toy_page, toy_tab.evaluate('location.hash'))
    assert toy_tab.evaluate(script) == chosen


@pytest.mark.slow
@pytest.mark.parametrize('text, line, said', [
    ('the nurse', 'zebra:0', 'zebra'), ('x' * 130_000, '', '10000'), ('x', 'x' * 130_000, '10000')],
    ids=['unknown word', 'long text', 'long line'])
def test_a_bad_link_is_named_and_keeps_its_text(text, line, said, tab, toy_page):
    """A link with an unknown word or too long a text gets a message, and the page works."""
    load(tab, toy_page, link(text, line))
    assert said in tab.text_content('#said')
    assert tab.input_value('#text') == text[:10_000]
    assert not tab.evaluate('document.body.inert')


@pytest.mark.slow
def test_it_writes_before_and_after_edits(tab, toy_page):
    """The page writes a text without and with edits, until the prompt changes."""
    load(tab, toy_page, link(PROMPT, 'nurse:0'))
    tab.click('#write summary')
    press(tab, 'Write')
    before, now = tab.locator('#written p').all_text_contents()
    assert before == PROMPT + write(tab, string=PROMPT, n=40)
    assert now == PROMPT + write(tab, string=PROMPT, n=40, lines=['nurse:0'])
    type_text(tab, 'The')
    assert tab.text_content('#written') == ''


N_SCRIPTS = 3  # on the page once it has started


@pytest.mark.slow
@pytest.mark.parametrize('text', NASTY, ids=ascii)
def test_any_text_can_be_typed(text, shared_tab, world):
    """For any text, the page shows its last tokens and ten words, and no script runs."""
    type_text(shared_tab, text)
    ids = encode(world.encoding, shared_tab.input_value('#text')) or [world.encoding.eot_token]
    n_read = min(len(ids), world.model.config.block_size)
    assert shared_tab.locator('#tokens button').count() == n_read
    cut = f'The first {len(ids) - n_read} tokens are left out'
    is_cut = cut in shared_tab.text_content('#legend')
    assert is_cut == (n_read < len(ids))
    assert shared_tab.locator('#next tbody tr').count() == 10
    assert shared_tab.locator('script').count() == N_SCRIPTS


@pytest.mark.slow
def test_markup_in_a_command_stays_text(out, capsys, tab):
    """Markup in --start and in a file's name is text in the page."""
    Path('x<').mkdir()
    name = 'x</script>.pt'
    Path(name).symlink_to(Path('out/toy/ckpt.pt').resolve())
    markup = '<script>document.body.innerHTML = "gone"</script></script><b>"&amp;\' the nurse'
    say(sample, capsys, '--html', 'page.html', '--start', markup, '--from', name)
    load(tab, Path('page.html'))
    assert tab.input_value('#text') == markup
    assert name in tab.text_content('#model')
    assert tab.locator('script').count() == N_SCRIPTS


# The first is for the picture in README.md, tests/page.png. To take it again:
# SCREENSHOTS=tests python -m pytest -m "" tests/test_page.py -k page
SIZES = {'page': (1280, 790), 'phone': (390, 844), 'landscape': (844, 390), 'narrow': (320, 640)}


@pytest.mark.slow
@pytest.mark.parametrize('size', SIZES)
def test_nothing_sticks_out(size, chromium, english_page):
    """The page never scrolls sideways. If SCREENSHOTS names a folder, screenshots go there."""
    width, height = SIZES[size]
    viewport = {'width': width, 'height': height}
    with open_tab(chromium, viewport=viewport, is_mobile=min(width, height) < 500) as tab:
        load(tab, english_page, link(PROMPT, 'nurse:10'))
        if 'SCREENSHOTS' in os.environ:
            tab.screenshot(path=ROOT / os.environ['SCREENSHOTS'] / f'{size}.png')
        assert tab.evaluate('document.scrollingElement.scrollWidth') <= width


@pytest.mark.slow
def test_a_phone_shows_the_two_words_above_a_slider(chromium, toy_page):
    """On a phone, the probabilities of the two words stay in view above the last slider."""
    with open_tab(chromium, viewport={'width': 390, 'height': 844}, is_mobile=True) as tab:
        load(tab, toy_page)
        slider = tab.locator('#cards input').last
        slider.focus()
        top = tab.locator('#pair').bounding_box()['y']
        assert 0 <= top < slider.bounding_box()['y'] < 844


@pytest.mark.slow
def test_every_control_has_a_name(shared_tab):
    """Every button and field has a label or text for people who do not see the page."""
    name = 'x => x.ariaLabel ?? [x, ...x.labels].map(one => one.textContent).join("").trim()'
    for control in shared_tab.locator('button, input, select, textarea').all():
        assert control.evaluate(name)


def test_a_model_too_large_is_refused(out, capsys, monkeypatch):
    """The error names a model with more parameters than a page takes, and no page is written."""
    monkeypatch.setattr(page_module, 'LARGEST', 1000)
    assert 'out/toy' in error_of(sample, capsys, '--html', 'page.html', '--from', 'out/toy')
    assert [path.name for path in Path().iterdir()] == ['out']
