"""What a training run starts from: nothing, its own checkpoint, or given parameters."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from rucksack.data import data_folder, facts_of, read_meta
from rucksack.errors import UserError, user_errors
from rucksack.model import GPT, Backpack, Config
from rucksack.training.machine import Machine
from rucksack.training.run_folder import read_log
from rucksack.weights import from_checkpoint, from_pretrained, load_file, make_model

# The settings that steer how long a run goes on, how often it reports, and where. max_iters can
# change the schedule; device and compile can change rounding and the draws of dropout.
STEERING = {
    'max_iters', 'eval_interval', 'keep_every', 'log_interval', 'device', 'compile', 'wandb_log'}


def out_dir_of(dataset: str, model: str, configs: list[str]) -> str:
    """Name the folder of a run after its config or, without one, its dataset."""
    name = dataset
    if configs:
        name = Path(configs[-1]).stem.removeprefix('train_')
    if model == 'gpt':
        name += '_gpt'
    return f'out/{name}'


def warmup_of(warmup_iters: int, max_iters: int, machine: Machine) -> int:
    """Return the steps of warmup, 5% of max_iters for -1; warn if the warmup never ends."""
    if warmup_iters < 0:
        return round(0.05 * max_iters)
    if warmup_iters >= max_iters > 0:
        machine.print0(f'warmup_iters={warmup_iters} is not below max_iters={max_iters}: learning '
                       'rates stay below their peaks; -1 warms up for 5% of the steps')
    return warmup_iters


@dataclass(frozen=True)
class Start:
    """What a run starts from."""

    name: str  # of the checkpoint or the parameters
    make: Callable[[Config], Backpack | GPT]  # makes its model
    settings: dict  # that it decides
    state: dict  # of the checkpoint to resume, with its log; else {}


def find_start(init_from: str, folder: Path, dataset: str, block_size: int, flags: set[str]
               ) -> Start:
    """Find what init_from names: nothing, the checkpoint in the run's folder, or given parameters.

    flags are the settings that were typed. UserError if it cannot be read or if the data do not
    fit it.
    """
    if init_from == 'scratch':
        return Start('', make_model, {}, {})
    if init_from == 'resume':
        return start_of_run(folder, flags)
    return start_of_given(init_from, dataset, block_size, flags)


def start_of_run(folder: Path, flags: set[str]) -> Start:
    """Read the checkpoint of a run, with its log; UserError if its data have changed."""
    path = folder / 'ckpt.pt'
    state = load_file(path)
    if 'optimizers' not in state:
        raise UserError(f'{path} has parameters alone; fine-tune them with --init_from={path}')
    with user_errors(path):
        model = from_checkpoint(state)
    with user_errors(path, f'fine-tune its weights with --init_from={path}'):
        # Its place is as typed, and so are the steering settings that were typed.
        free = flags & STEERING | {'out_dir', 'init_from', 'overwrite'}
        decided = {name: value for name, value in state['settings'].items() if name not in free}
        state['log'] = read_log(folder, int(state['step']))
        data = data_folder(decided['dataset'])
    if state['data'] != facts_of(read_meta(data)):
        raise UserError(f'{data} is not the data that {path} was trained on; restore it')
    return Start(str(path), lambda config: model, decided, state)


def start_of_given(source: str, dataset: str, block_size: int, flags: set[str]) -> Start:
    """Load a model to start from; UserError unless it can read the ids of data/NAME.

    It decides the settings model, shape and block_size. Texts may be shorter than its block_size. A
    Transformer starts a Transformer, unless flags, the names of settings that were typed, has
    model; n_sense and sense_hidden are then free.
    """
    given, tokenizer = from_pretrained(source)
    config = given.config
    meta = read_meta(data_folder(dataset))
    is_other = tokenizer not in (None, meta['tokenizer'])
    if is_other or config.n_vocab < meta['vocab_size']:
        raise UserError(f'{source} ({config.n_vocab:,} ids) and data/{dataset} '
                        f'({meta["vocab_size"]:,} ids) have different tokenizers; run python '
                        f'prepare.py {dataset} --text FILE --like {source} --overwrite')
    decided = {
        'block_size': min(block_size, config.block_size),
        'n_layer': config.n_layer,
        'n_head': config.n_head,
        'n_embd': config.n_embd}
    if config.n_sense:
        decided |= {
            'model': 'backpack',
            'n_sense': config.n_sense,
            'sense_hidden': config.sense_hidden}
    elif 'model' not in flags:
        decided['model'] = 'gpt'
    return Start(source, partial(start_from, given), decided, {})


def start_from(given: Backpack | GPT, config: Config) -> Backpack | GPT:
    """Make a model that starts from a given one.

    A Backpack gets its embeddings, blocks and ln_f from a Transformer; its senses are new, and it
    reads no more than block_size. Otherwise the model keeps its block_size.
    """
    state = given.state_dict()
    block_size = given.config.block_size
    is_new_backpack = config.n_sense > 0 and isinstance(given, GPT)
    if is_new_backpack:  # it will be trained only on such texts
        block_size = config.block_size
        state['contextualizer.wpe.weight'] = state['contextualizer.wpe.weight'][:block_size]
    config = replace(config, vocab_size=given.config.vocab_size, block_size=block_size)
    model = make_model(config)
    model.load_state_dict(state, strict=False)
    if is_new_backpack:
        # Trained embeddings are larger than new ones, whose standard deviation is 0.02. Smaller
        # senses keep the first logits as small as from scratch.
        model.sense_network.final_mlp.c_proj.weight.data *= 0.02 / given.wte.weight.std()
    return model
