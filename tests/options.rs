//! The options of the command line and of the configuration file: a command has those that have an effect on it, and no
//! others.

use crate::support::program::{assert_error, unicorn};

#[test]
fn an_option_that_has_no_effect_on_a_command_is_refused() {
    for (command, option) in [
        (&["devices"][..], &["--device", "9"][..]),
        (&["devices"], &["--allow-software-vulkan"]),
        (&["completions", "bash"], &["--quantize", "int8-row"]),
        (&["completions", "bash"], &["-v"]),
        (&["man-pages", "pages"], &["--config", "file"]),
        (&["inspect", "model"], &["--npu", "auto"]),
        (&["inspect", "model"], &["--tokenizer", "file"]),
        (&["synth", "--shape", "gemma-3-270m", "folder"], &["--kv", "int8"]),
        (&["quantize", "model", "folder"], &["--quantize", "int8-row"]),
        (&["eval", "logits", "model", "--tokens", "2", "--output", "file"], &["--tokenizer", "file"]),
        (&["plan", "model"], &["--precision", "f32"]),
        (&["plan", "--shape", "gemma-3-1b", "--scheme", "bf16"], &["--model-config", "file"]),
        (&["doctor"], &["--no-tune"]),
        (&["pull", "a/b"], &["--context", "5"]),
        (&["models", "list"], &["--model-config", "file"]),
        (&["bench", "npu"], &["--npu", "off"]),
        (&["bench", "kernels"], &["--context", "5"]),
        (&["bench", "isa"], &["--allow-software-vulkan"]),
        (&["bench", "serve"], &["--precision", "f32"]),
    ] {
        assert_error(unicorn(&[command, option].concat()), 2, &[option[0], "argument"]);
    }
}
