"""What a training run starts from: nothing, its own checkpoint, or given weights."""

import math
from dataclasses import replace
from pathlib import Path

from rucksack.cli import UserError, reading
from rucksack.hub import from_pretrained
from rucksack.model import GPT, Backpack, Config
from rucksack.training.checkpoint import make_model
from rucksack.training.machine import Machine

# The settings that a model's Config takes, n_sense = 0 for a GPT.
SHAPE = ('n_layer', 'n_head', 'n_embd', 'n_sense', 'sense_hidden', 'block_size', 'dropout')

# The settings that steer how long a run goes on, how often it reports, and where. max_iters can
# change the schedule; device and compile can change rounding and the draws of dropout.
STEERING = {
    'max_iters', 'eval_interval', 'keep_every', 'log_interval',
    'out_dir', 'init_from', 'overwrite',
    'device', 'compile', 'wandb_log',
}


def config_of(settings: dict, n_vocab: int) -> Config:
    """Make the Config of a model from the settings of a run, for data with n_vocab ids.

    UserError if the numbers do not fit together.
    """
    shape = {name: settings[name] for name in SHAPE}
    if settings['model'] == 'gpt':
        shape['n_sense'] = 0
    rows = math.ceil(n_vocab / 64) * 64  # GPUs like multiples of 64
    with reading('this model', problem='cannot be made'):
        return Config(vocab_size=rows, n_vocab=n_vocab, **shape)


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


def load_weights(source: str, meta: dict, dataset: str) -> Backpack | GPT:
    """Load weights to start from; UserError unless they can read the ids of data/NAME."""
    weights, tokenizer = from_pretrained(source)
    n_vocab = weights.config.n_vocab
    is_other = tokenizer not in (None, meta['tokenizer'])
    if is_other or n_vocab < meta['vocab_size']:
        raise UserError(f'{source} ({n_vocab:,} ids) and data/{dataset} '
                        f'({meta["vocab_size"]:,} ids) have different tokenizers; run python '
                        f'prepare.py {dataset} --text FILE --like {source} --overwrite')
    return weights


def settings_of_run(saved: dict, flags: set[str]) -> dict:
    """Choose from the saved settings of a run those that it keeps when resumed.

    Its place is as typed, and so are the steering settings that flags says were typed.
    """
    free = flags & STEERING | {'out_dir', 'init_from', 'overwrite'}
    return {name: value for name, value in saved.items() if name not in free}


def settings_of_weights(config: Config, block_size: int, flags: set[str]) -> dict:
    """Return the settings that the weights to start from decide: model, shape and block_size.

    Texts may be shorter than the model's block_size. Transformer weights start a Transformer,
    unless flags, the names of settings that were typed, has model; n_sense and sense_hidden are
    then free.
    """
    names = ['n_layer', 'n_head', 'n_embd']
    decided = {'block_size': min(block_size, config.block_size)}
    if config.n_sense:
        names += ['n_sense', 'sense_hidden']
        decided['model'] = 'backpack'
    elif 'model' not in flags:
        decided['model'] = 'gpt'
    shape = {name: getattr(config, name) for name in names}
    return decided | shape


def with_decided(typed: object, flags: set[str], decided: dict) -> object:
    """Replace decided settings in typed, the Settings of train.py.

    UserError if one that was typed, as flags says, differs.
    """
    for name in sorted(flags & decided.keys()):
        value = getattr(typed, name)
        if value != decided[name]:
            raise UserError(f'the checkpoint has {name}={decided[name]}; '
                            f'drop --{name}={value}')
    return replace(typed, **decided)


def start_from(weights: Backpack | GPT, config: Config) -> Backpack | GPT:
    """Make a model that starts from weights.

    A Backpack gets its embeddings, blocks and ln_f from a Transformer; its senses are new, and it
    reads no more than block_size. Otherwise the weights keep their own block_size.
    """
    state = weights.state_dict()
    block_size = weights.config.block_size
    is_new_backpack = config.n_sense > 0 and isinstance(weights, GPT)
    if is_new_backpack:  # it will be trained only on such texts
        block_size = config.block_size
        state['contextualizer.wpe.weight'] = state['contextualizer.wpe.weight'][:block_size]
    config = replace(config, vocab_size=weights.config.vocab_size, block_size=block_size)
    model = make_model(config)
    model.load_state_dict(state, strict=False)
    if is_new_backpack:
        # Trained embeddings are larger than new ones, whose standard deviation is 0.02. Smaller
        # senses keep the first logits as small as from scratch.
        model.sense_network.final_mlp.c_proj.weight.data *= 0.02 / weights.wte.weight.std()
    return model
