#!/bin/sh
# Fetches the vocabulary of the real Gemma 4 as GGUF without weights (16 MB), which llama.cpp has among its tests, from the
# source package of llama-cpp-python. tools/fetch_package_file.sh says how it exits.
exec "$(dirname "$0")/fetch_package_file.sh" "llama-cpp-python==0.3.36 --no-binary llama-cpp-python" \
    vendor/llama.cpp/models/ggml-vocab-gemma-4.gguf \
    58b1ba0b57f3b4d7c468ba4ffd91ad85190346a3d7ad7e71d1cabaae8a14bb65 .cache/gemma4-vocabulary/ggml-vocab-gemma-4.gguf
