"""A Backpack for Hugging Face transformers (4.57 and 5), in a file that needs nothing else:

    AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)

Weights have the names of stanfordnlp/backpack-gpt2; rucksack's model.py explains the architecture.
"""

import math

import torch
from torch import nn
from torch.nn import functional as F
from transformers import GenerationMixin, GPT2Config, GPT2Model, GPT2PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP
from transformers.pytorch_utils import Conv1D


class BackpackConfig(GPT2Config):
    """GPT-2's settings, num_senses k, and n_vocab, the ids in use where embeddings have more rows."""

    model_type, num_senses, n_vocab = 'backpack-gpt2', 16, None


class SenseNetwork(nn.Module):
    """Eq. 10: embeddings (B, T, d) -> senses C (B, T, k, d)."""

    def __init__(self, config: BackpackConfig):
        super().__init__()
        d, self.k, self.block = config.n_embd, config.num_senses, nn.Module()
        self.ln, self.block.ln_1, self.block.ln_2 = nn.LayerNorm(d), nn.LayerNorm(d), nn.LayerNorm(d)
        self.block.mlp, self.final_mlp = GPT2MLP(4 * d, config), GPT2MLP(4 * d, config)
        self.final_mlp.c_proj = Conv1D(self.k * d, 4 * d)

    def forward(self, e):
        r = e + self.ln(e)  # (B, T, d)
        r = r + self.block.mlp(self.block.ln_1(r))  # (B, T, d)
        return self.final_mlp(self.block.ln_2(r)).unflatten(-1, (self.k, -1))  # (B, T, k, d)


class BackpackForCausalLM(GPT2PreTrainedModel, GenerationMixin):
    """Text in, logits of the next token out; each step reads the whole text, whose senses are summed."""

    config_class, base_model_prefix = BackpackConfig, 'backpack'
    _keys_to_ignore_on_load_unexpected = ['lm_head', 'word_embeddings', 'position_embeddings']  # tied copies

    def __init__(self, config: BackpackConfig):
        super().__init__(config)
        self.backpack = nn.Module()
        self.backpack.gpt2_model, self.backpack.sense_network = GPT2Model(config), SenseNetwork(config)
        self.backpack.sense_weight_net = nn.Module()
        self.backpack.sense_weight_net.c_attn = nn.Linear(config.n_embd, 2 * config.n_embd)
        self.post_init()

    def get_input_embeddings(self):
        return self.backpack.gpt2_model.wte

    def forward(self, input_ids, attention_mask=None, labels=None, **unused):
        """logits (B, T, V) for input_ids (B, T), and the loss of labels (B, T); -100 does not count."""
        gpt2, k, T = self.backpack.gpt2_model, self.config.num_senses, input_ids.shape[1]
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask  # (B, T), 0: padding
        places = (mask.cumsum(-1) - 1).clamp(min=0)  # (B, T)
        h = gpt2(input_ids, attention_mask=mask, position_ids=places, use_cache=False)[0]  # (B, T, d)  Eq. 11
        C = self.backpack.sense_network(gpt2.wte(input_ids))  # (B, T, k, d)                            Eq. 10
        query, key = (x.unflatten(-1, (k, -1)).transpose(1, 2)  # (B, k, T, d/k) each
                      for x in self.backpack.sense_weight_net.c_attn(h).chunk(2, dim=-1))
        scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])  # (B, k, T, T)
        seen = torch.ones(T, T, dtype=torch.bool, device=h.device).tril() & mask[:, None, None].bool()
        alpha = scores.masked_fill(~seen, torch.finfo(h.dtype).min).softmax(-1)  # (B, k, T, T)         Eq. 12
        o = torch.einsum('blij,bjld->bid', alpha, C)  # (B, T, d)                                       Eq. 2
        logits = F.linear(o, gpt2.wte.weight)  # (B, T, V)                                              Eq. 9
        n = self.config.n_vocab or logits.shape[-1]
        logits = logits.masked_fill(torch.arange(logits.shape[-1], device=h.device) >= n, -math.inf)
        loss = labels if labels is None else F.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutput(loss=loss, logits=logits)
