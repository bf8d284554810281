#!/bin/sh
# Fetches the files of other projects that the site and the slides serve themselves. Run it once per version and commit
# the result; everything else comes from PyPI. The version of KaTeX is that of sphinxcontrib-katex in pyproject.toml.
set -eu
cd "$(dirname "$0")/_static"
packages=$(mktemp -d)
trap 'rm -rf "$packages"' EXIT
(cd "$packages" && npm init -y >/dev/null && npm install --no-fund --no-audit --ignore-scripts \
    katex@0.16.22 reveal.js@5.2.1)
rm -rf vendor
mkdir -p vendor/katex/fonts vendor/reveal
katex=$packages/node_modules/katex
cp "$katex"/dist/katex.min.css "$katex"/dist/contrib/auto-render.min.js vendor/katex/
cp "$katex"/dist/fonts/*.woff2 vendor/katex/fonts/
cp "$katex"/LICENSE vendor/katex/
reveal=$packages/node_modules/reveal.js
cp "$reveal"/dist/reveal.js "$reveal"/dist/reveal.css "$reveal"/LICENSE vendor/reveal/
