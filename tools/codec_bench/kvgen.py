"""Synthetic K and V tensors that look like an LLM's, for measuring codecs (codecs.md): the same seed gives the same bytes.

    python kvgen.py --seed 7 --windows 6 --tokens 1024 --out acts.pt

Each window is a list over layers of (q, k, v): q [tokens, q_heads, head_dim], k and v [tokens, kv_heads, head_dim], bf16, k
and q after RoPE. What it imitates: low-rank latents with a power-law spectrum, correlated in time and shared by layers and
heads; a K bias with three outlier channel pairs a head at 6 to 20 sigma in the slow RoPE half; jitter of token norms;
heavy-tailed noise (Student t, 6 degrees); an attention sink at token 0 (tiny V, K along the bias). The constants follow what
KIVI, KVQuant and Qwen's reports describe.
"""

import argparse
import math

import torch


def rope(x: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotary embedding over halves; x [tokens, heads, head_dim] float32."""
    tokens, _, dim = x.shape
    angle = torch.arange(tokens).float()[:, None] * theta ** (-torch.arange(dim // 2).float() * 2 / dim)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b = x[..., : dim // 2], x[..., dim // 2 :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def windows(
    count: int,
    *,
    seed: int,
    layers: int = 4,
    tokens: int = 1024,
    q_heads: int = 8,
    kv_heads: int = 4,
    head_dim: int = 128,
    theta: float = 5e5,
) -> list[list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]]:
    """`count` windows of one model, which the seed makes with all that is random in it."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g)

    def heavy(*shape: int) -> torch.Tensor:
        return normal(*shape) * torch.rsqrt(sum(normal(*shape) ** 2 for _ in range(6)) / 6)

    channels, rank = kv_heads * head_dim, 384
    spectrum = (torch.arange(rank).float() + 4) ** -0.55
    spectrum /= spectrum.norm()
    weights = []
    for _ in range(layers):
        bias = 0.5 * normal(kv_heads, head_dim)
        for head in range(kv_heads):
            for pair in torch.randperm(head_dim // 4, generator=g)[:3].tolist():
                size, phase = (
                    6 + 14 * torch.rand(1, generator=g).item(),
                    2 * math.pi * torch.rand(1, generator=g).item(),
                )
                at = head_dim // 4 + pair
                bias[head, at], bias[head, at + head_dim // 2] = size * math.cos(phase), size * math.sin(phase)
        weights.append(
            (
                bias,
                normal(rank, channels),
                normal(rank, channels),
                normal(rank, q_heads * head_dim),
                torch.exp(0.35 * normal(channels)),
                torch.exp(0.3 * normal(channels)),
                0.4 * normal(q_heads, head_dim),
            )
        )
    decay = torch.linspace(0.9, 0.2, rank)
    out = []
    for _ in range(count):
        noise, latent = normal(tokens, rank), torch.zeros(tokens, rank)
        latent[0] = noise[0]
        for t in range(1, tokens):
            latent[t] = decay * latent[t - 1] + (1 - decay**2).sqrt() * noise[t]
        window = []
        for bias, to_k, to_v, to_q, k_scale, v_scale, q_bias in weights:
            z = (0.9 * latent + 0.43 * normal(tokens, rank)) * spectrum
            jitter = torch.exp(0.15 * normal(tokens, 1))
            k = ((z @ to_k + 0.45 * heavy(tokens, channels)) * k_scale * jitter).view(tokens, kv_heads, head_dim) + bias
            v = ((z @ to_v + 0.55 * heavy(tokens, channels)) * v_scale * jitter).view(tokens, kv_heads, head_dim)
            seen = (k - bias).repeat_interleave(q_heads // kv_heads, 1).roll(1, 0)
            q = 0.55 * seen + 0.6 * (z @ to_q).view(tokens, q_heads, head_dim) + q_bias
            k[0], v[0] = bias * 1.6, v[0] * 0.03
            window.append((rope(q, theta).bfloat16(), rope(k, theta).bfloat16(), v.bfloat16()))
        out.append(window)
    return out


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--windows", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--out", required=True)
    arguments = parser.parse_args()
    torch.save(windows(arguments.windows, seed=arguments.seed, tokens=arguments.tokens), arguments.out)
