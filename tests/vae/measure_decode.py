"""python tests/vae/measure_decode.py [--size 1920x1088] [--decoder turbo|wan] [--contiguous] [--profile]

Decodes one window with random weights in the released sizes on the accelerator and prints seconds and peak memory.
"""

import argparse
import importlib.util
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent.parent
_spec = importlib.util.spec_from_file_location("magi2_packages", ROOT / "magi2_core" / "packages.py")
_packages = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_packages)
_packages.register()

RELEASED = {
    "latent_channels": 48,
    "out_channels": 3,
    "decoder_block_out_channels": [64, 128, 256, 512],
    "decoder_layers_per_block": [2, 2, 2, 3, 3],
    "decoder_spatio_temporal_scaling": [False, True, True, True],
    "decoder_spatio_only": [False, True, False, False],
    "decoder_is_dw_conv": [False] * 5,
    "decoder_dw_kernel_size": 5,
    "resnet_norm_eps": 1e-6,
    "patch_size": 2,
    "first_chunk_size": 7,
    "step_size": 7,
    "use_unpatchify": True,
}


def main() -> None:
    from magi2_core import device as devices
    from magi2_core.config import WanVAEConfig
    from magi2_core.vae import turbo_blocks
    from magi2_core.vae.turbo import TurboConfig, TurboVAED
    from magi2_core.vae.wan import WanVAE

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", default="1920x1088")
    parser.add_argument("--decoder", choices=("turbo", "wan"), default="turbo")
    parser.add_argument("--contiguous", action="store_true", help="keep the weights in plain layout")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--slice", type=int, default=28, help="log2 of the elements of a slice")
    options = parser.parse_args()
    device = devices.resolve()
    devices.use_full_fp32()
    turbo_blocks.SLICE_ELEMENTS = 1 << options.slice
    width, height = (int(side) for side in options.size.split("x"))
    torch.manual_seed(0)
    latents = torch.randn(1, 48, 16 if options.decoder == "turbo" else 3, height // 16, width // 16, device=device)
    with torch.device(device):
        if options.decoder == "turbo":
            model = TurboVAED(TurboConfig.from_dict(RELEASED)).to(torch.bfloat16)
        else:
            model = WanVAE(WanVAEConfig(), encoder=False)
    if options.decoder == "turbo" and not options.contiguous:
        model.finish_loading()
    for attempt in range(options.repeat):
        devices.synchronize(device)
        devices.peak_bytes(device, reset=True)
        started = time.perf_counter()
        if options.decoder == "turbo":
            out = model.decode_window(latents, model.windows(16)[1])
        else:
            out = model.decode(latents)
        devices.synchronize(device)
        print(
            f"{options.size} {options.decoder} contiguous={options.contiguous} slice={options.slice} run {attempt}: {time.perf_counter() - started:.3f} s, peak {devices.peak_bytes(device) / 1e9:.2f} GB, "
            f"frames {out.shape[2]}, std {out.float().std():.6f}",
            flush=True,
        )
    if options.profile:
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as record:
            model.decode_window(latents, model.windows(16)[1]) if options.decoder == "turbo" else model.decode(latents)
        print(record.key_averages().table(sort_by="cuda_time_total", row_limit=14, max_name_column_width=70))


if __name__ == "__main__":
    main()
