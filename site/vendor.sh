#!/bin/sh
# Fetches the files of other projects that the site serves itself. Run it once per version and commit the result;
# everything else comes from PyPI. The version of KaTeX is that of sphinxcontrib-katex in pyproject.toml.
set -eu
cd "$(dirname "$0")/_static"
packages=$(mktemp -d)
trap 'rm -rf "$packages"' EXIT
(cd "$packages" && npm init -y >/dev/null && npm install --no-fund --no-audit --ignore-scripts \
    katex@0.16.22 @jupyter-widgets/html-manager@1.0.15)
rm -rf vendor
mkdir -p vendor/katex/fonts vendor/widgets
katex=$packages/node_modules/katex
cp "$katex"/dist/katex.min.css vendor/katex/
cp "$katex"/dist/fonts/*.woff2 vendor/katex/fonts/
cp "$katex"/LICENSE vendor/katex/
widgets=$packages/node_modules/@jupyter-widgets/html-manager
cp "$widgets"/dist/embed.js "$widgets"/dist/*.woff2 vendor/widgets/
cp "$widgets"/LICENSE vendor/widgets/ 2>/dev/null || true
