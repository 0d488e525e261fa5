"""Export a model to a folder that Hugging Face transformers, and rucksack, can load.

    python -m rucksack export my_model --from out/mine
"""

import json
import shutil
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import save_file
from torch import Tensor

from rucksack.cli import run_cli
from rucksack.errors import UserError
from rucksack.fast import Cached
from rucksack.hub.find import WEIGHTS
from rucksack.hub.published import BODY, FIXED, RENAMED, SIZE_NAMES, is_transposed
from rucksack.loaded import load_model
from rucksack.model import GPT, Backpack, Config
from rucksack.tokenizer import load_tokenizer, tokenizer_files
from rucksack.verbs import make_parser

CODE = Path(__file__).with_name('modeling_backpack.py')  # for transformers to run
CARD = Path(__file__).with_name('card.md')


def export(model: Backpack | GPT, tokenizer: dict, folder: str | Path,
           dtype: torch.dtype = torch.float32) -> None:
    """Write a Backpack in the format of stanfordnlp/backpack-gpt2, or a Transformer in gpt2's.

    tokenizer is a description, as from_pretrained returns it; weights are written in dtype. Raises
    UserError, and writes nothing, if the folder exists or if the model could not be loaded again.
    The published code can load a Backpack only if sense_hidden is 4 * n_embd.
    """
    c = model.config
    folder = Path(folder).expanduser().resolve()
    if folder.exists():
        raise UserError(f'{folder} exists; give the name of a new folder')
    if not Cached(model).is_repeated:
        raise UserError("only model.py's Backpack, whose contextualizer is a GPT-2, and GPT can be "
                        'exported, without hooks')
    encoding = load_tokenizer(tokenizer)
    weights = to_published_names(model, dtype)
    files = tokenizer_files(tokenizer, c.block_size)
    files['config.json'] = settings_of(c, encoding.eot_token)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent) as temporary:
        new = Path(temporary, folder.name)
        new.mkdir()
        save_file(weights, new / WEIGHTS[0], {'format': 'pt'})
        for name, content in files.items():
            text = json.dumps(content, ensure_ascii=False) + '\n'
            (new / name).write_text(text, encoding='utf-8')
        shutil.copyfile(CARD, new / 'README.md')
        if c.n_sense:
            shutil.copyfile(CODE, new / CODE.name)
        new.rename(folder)  # appears whole or not at all


def to_published_names(model: Backpack | GPT, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the weights by their published names, in dtype, on the CPU.

    Raises UserError if one of them is not finite.
    """
    body = BODY if model.config.n_sense else 'transformer.'
    published = {}
    for name, weight in model.state_dict().items():
        prefix = next(ours for ours in RENAMED if name.startswith(ours))
        theirs = RENAMED[prefix] + name.removeprefix(prefix)
        if is_transposed(theirs):
            weight = weight.t()
        if not theirs.startswith('backpack.'):
            theirs = body + theirs
        weight = weight.to(dtype).contiguous().cpu()
        if not weight.isfinite().all():
            raise UserError(f'{name} has a value that is not finite')
        published[theirs] = weight
    return published


def settings_of(c: Config, end: int) -> dict:
    """Make the contents of config.json for our config and the id of end-of-text."""
    settings = {
        'architectures': ['GPT2LMHeadModel'],
        'scale_attn_by_inverse_layer_idx': False,
        'attn_pdrop': c.dropout,
        'embd_pdrop': c.dropout,
        'bos_token_id': end,
        'eos_token_id': end}
    settings |= {name: allowed[0] for name, allowed in FIXED.items()}
    settings |= {theirs: getattr(c, ours) for theirs, ours in SIZE_NAMES.items()}
    if c.n_sense:
        settings |= {
            'architectures': ['BackpackForCausalLM'], 'model_type': 'backpack-gpt2',
            'auto_map': {
                'AutoConfig': f'{CODE.stem}.BackpackConfig',
                'AutoModelForCausalLM': f'{CODE.stem}.BackpackForCausalLM'}}
    return settings


# -----------------------------------------------------------------------------
# The verb.


def run(argv: list[str]) -> None:
    """Write the folder."""
    parser = make_parser('export', __doc__, '--from')
    parser.add_argument('folder', metavar='DIR')
    parser.add_argument('--dtype', choices=('float32', 'bfloat16'), default='float32',
                        help='of the weights [float32]')
    flags = parser.parse_args(argv)
    loaded = load_model(flags.source, 'cpu')
    export(loaded.model, loaded.tokenizer, flags.folder, getattr(torch, flags.dtype))
    print(f'{loaded.about()}\n{flags.folder}: written')


main = partial(run_cli, 'rucksack export', run)
