"""A Llama-family checkpoint that the probes can look into, in place of a run."""
import os
import types

import numpy as np
import torch

import pe as encodings
from engine import config, data
from engine.config import UserError
from model import Attention


class LlamaRoPE(encodings.RoPE):
    """RoPE with the frequencies theta [d/2], and the scaling, of a checkpoint's rotary module."""
    def __init__(self, cfg, rotary):
        super().__init__(cfg)
        self.theta, self.scaling = rotary.inv_freq.float(), rotary.attention_scaling

    def qk(self, q, k, at):
        return [encodings.rotate(x, pos[..., None] * self.theta) * self.scaling
                for x, pos in ((q, at.t), (k, at.s))]


class LlamaAttention(Attention):
    """A Llama's attention as one of ours: keys and values repeated for the queries that share them
    (GQA), and the pairs of features (c, c + d/2) that it rotates moved to (2c, 2c + 1)."""
    def __init__(self, theirs, cfg, enc):
        super().__init__(cfg, enc)
        self.linears, self.proj = [theirs.q_proj, theirs.k_proj, theirs.v_proj], theirs.o_proj

    def make_projections(self, cfg):
        pass

    def project(self, x):
        q, k, v = (linear(x).unflatten(-1, (-1, self.pe.cfg.head_dim))    # (B, T, H or fewer, D)
                   for linear in self.linears)
        q, k = (z.unflatten(-1, (2, -1)).transpose(-2, -1).flatten(-2) for z in (q, k))
        k, v = (z.repeat_interleave(self.heads // z.shape[2], dim=2) for z in (k, v))
        return q.flatten(-2), k.flatten(-2), v.flatten(-2)

    def in_place(self, hidden_states, **_):
        """The forward() of theirs."""
        return self(hidden_states, torch.arange(hidden_states.shape[1]), None), None


class Llama(torch.nn.Module):
    """A LlamaForCausalLM, or a Mistral or Qwen2, whose attention layers are LlamaAttention."""
    def __init__(self, net):
        super().__init__()
        self.net, self.blocks, c = net, net.model.layers, net.config
        if c.model_type not in ('llama', 'mistral', 'qwen2'):
            raise UserError('--hf takes checkpoints of the Llama family (llama, mistral, qwen2), '
                            f'not {c.model_type}')
        width = c.num_attention_heads * self.blocks[0].self_attn.head_dim
        self.cfg = encodings.PEConfig(d_model=width, n_head=c.num_attention_heads,
                                      n_layer=len(self.blocks), train_len=c.max_position_embeddings)
        for layer in self.blocks:
            enc = LlamaRoPE(self.cfg, net.model.rotary_emb)
            layer.attn = LlamaAttention(layer.self_attn, self.cfg, enc)
            layer.self_attn.forward = layer.attn.in_place

    def forward(self, tokens, pos=None):
        if pos is not None:
            raise UserError('a checkpoint is run at positions 0, 1, 2, ... only')
        return self.net(input_ids=tokens, use_cache=False).logits.float(), None


class LlamaText(data.Corpus):
    """A text file in a checkpoint's tokens, for tests; each stretch begins as the tokenizer's."""
    first = 0

    def __init__(self, tokenizer, path):
        self.vocab = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
        self.data, self.begin = path, tokenizer('').input_ids
        text = data.read_text(path)
        self.ids = np.array(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)

    def read(self):
        return [('test', self.ids)]

    def lay_out(self, pieces, length):
        pieces = [[*self.begin, *piece][:length] for piece in pieces]
        tokens, targets = super().lay_out(pieces, length)
        for piece, row, target in zip(pieces, tokens, targets):
            target[:len(piece) - 1] = row[1:len(piece)]    # 0 is a token, too
        return tokens, targets


def load(path, text='', needs_text=True):
    """(model, cfg) of a folder or GGUF file and the text to run it on, as core.load() of a run."""
    if needs_text and not text:
        raise UserError('--hf needs --text=FILE, a text to look at')
    for file in filter(None, (path, text)):
        if not os.path.exists(file):
            raise UserError(f'no such file or folder: {file}')
    gguf = dict(gguf_file=os.path.basename(path)) if path.endswith('.gguf') else {}
    folder = os.path.dirname(os.path.abspath(path)) if gguf else path
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
        net = AutoModelForCausalLM.from_pretrained(folder, **gguf, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(folder, **gguf)
    except ImportError as error:
        raise UserError(f'--hf needs {error.name}: pip install transformers'
                        + ' gguf accelerate' * bool(gguf)) from None
    except (OSError, ValueError) as error:
        raise UserError(f'cannot load {path}: {str(error).strip().splitlines()[0]}') from None
    model, name = Llama(net).eval(), os.path.basename(os.path.normpath(path))
    lengths, the_task = [model.cfg.train_len], LlamaText(tokenizer, text) if text else None
    return model, types.SimpleNamespace(
        **vars(model.cfg), task=name, data=text, the_task=the_task, train_lengths=lengths,
        eval_lengths=lengths, out_dir=f'out/{config.slug(name)}')
