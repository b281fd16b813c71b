"""Kernels of ComfyUI-MAGI2, imported as `magi2_kernels`. Imports nothing here; each op is a folder.

| op | what it computes |
| --- | --- |
| modality_rms_norm | RMSNorm with a (1 + w) scale chosen by the token's modality |
| qk_norm_rope | per-head RMSNorm of q and k, then the three-axis rotary embedding |
| swiglu | clamped SwiGLU ("swiglu7") on interleaved columns |
| grouped_linear | linear layer whose weight is chosen by the token's modality |
| hyper_connection | manifold hyper-connections: coefficients, Sinkhorn, branch input, connect |
| sink_attention | packed multi-head attention with learned sinks and output gate |
| block_attention | grid-window attention of the refiner |
| moe_routing | sigmoid router: top-k, normalise, sort |
| multi_head_moe | gather, experts, combine |
"""
