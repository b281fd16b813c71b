#!/usr/bin/env bash
# Makes two clips with the small checkpoint in this folder, one from a prompt and one from a prompt and a picture.
# Installs what it needs into .venv first; no GPU needed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
. .ci/setup.sh

mkdir -p output
started=$SECONDS

prompt="a red circle moves to the right over a blue background, low hum"
printf '\n1. From a prompt: "%s"\n\n$ %s -m magi2_core generate --prompt "%s" --output output/t2va.mp4\n' "$prompt" "$PY" "$prompt"
"$PY" -m magi2_core generate --prompt "$prompt" --output output/t2va.mp4

picture=magi2_core/assets/green_square.png
prompt="a green square moves to the left over a gray background, middle wind"
printf '\n2. From a prompt and a picture, %s: "%s"\n\n$ %s -m magi2_core generate --prompt "%s" --image %s --output output/i2va.mp4\n' \
  "$picture" "$prompt" "$PY" "$prompt" "$picture"
"$PY" -m magi2_core generate --prompt "$prompt" --image "$picture" --output output/i2va.mp4

cat <<END

Done in $((SECONDS - started)) s: output/t2va.mp4 and output/i2va.mp4.
Now change the prompt in a command above. The small checkpoint knows one moving shape with a sound:
  shapes       circle, square, triangle
  colours      red, green, blue, yellow, purple, white
  backgrounds  black, blue, green, gray
  motions      moves to the right, moves to the left, moves up, moves down, stays still, bounces between the walls
  sounds       low, middle or high; hum, beeps or wind
Add --seed 7 for another clip of the same prompt. All options: $PY -m magi2_core generate --help
END
