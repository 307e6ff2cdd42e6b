#!/bin/sh
# Fetches files of llama.cpp's tree from the source package of llama-cpp-python: the vocabulary of the real Gemma 4 as GGUF
# without weights (16 MB), and the chat templates of tests/data/families/template-goldens.json.
# tools/fetch_package_files.sh says how it exits.
tree=vendor/llama.cpp/models
exec "$(dirname "$0")/fetch_package_files.sh" .cache/llama-cpp "llama-cpp-python==0.3.36 --no-binary llama-cpp-python" \
    $tree/ggml-vocab-gemma-4.gguf 58b1ba0b57f3b4d7c468ba4ffd91ad85190346a3d7ad7e71d1cabaae8a14bb65 \
    $tree/templates/meta-llama-Llama-3.1-8B-Instruct.jinja e10ca381b1ccc5cf9db52e371f3b6651576caee0a630b452e2816b2d404d4b65 \
    $tree/templates/meta-llama-Llama-3.2-3B-Instruct.jinja 5816fce10444e03c2e9ee1ef8a4a1ea61ae7e69e438613f3b17b69d0426223a4 \
    $tree/templates/mistralai-Mistral-Nemo-Instruct-2407.jinja e4676cb56dffea7782fd3e2b577cfaf1e123537e6ef49b3ec7caa6c095c62272 \
    $tree/templates/Mistral-Small-3.2-24B-Instruct-2506.jinja 5b8f31f11198696548d544dbe424a3c1ef244d00a475f4e1bffb351fda085608 \
    $tree/templates/mistralai-Ministral-3-14B-Reasoning-2512.jinja 39f03c383413f531fd302c06c7e982ad98c83f0657a8339ae25478ccb81fdcda \
    $tree/templates/NousResearch-Hermes-3-Llama-3.1-8B-tool_use.jinja 7ce09d55d3690e06c70b5c07228cc7e8c99c43a23cdc027762be4011efcdea6c \
    $tree/templates/Qwen-Qwen2.5-7B-Instruct.jinja cd8e9439f0570856fd70470bf8889ebd8b5d1107207f67a5efb46e342330527f \
    $tree/templates/Qwen3-Coder.jinja d287fb2edf144207f868ae1b282755dc19db2a3f1c5b3a3d57e9e5abffa98392
