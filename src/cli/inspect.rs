//! `unicorn inspect`: shows the contents of a checkpoint, without a device.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::json;

use super::args;
use super::error::Error;
use super::load;
use super::progress::Bar;
use super::terminal::{bytes, print};
use crate::checkpoint::{self, Manifest, Tensor};
use crate::config::Config;
use crate::model::spec::{AttentionHeads, Mixture};
use crate::tensor::QuantizeMode;
use crate::text::{CallFormat, visible};

pub fn inspect(options: &Config, args: &args::Inspect) -> Result<(), Error> {
    let files = load::files_at(Path::new(&args.model), &options.model)?;
    let source = load::Source::open(&files)?;
    let weights = source.weights()?;
    let manifest = Manifest::read(&files)?;
    if args.verify {
        let Some(manifest) = &manifest else {
            return Err(Error::Argument(format!(
                "--verify: {} has no checksums; only checkpoints written by `unicorn quantize` have them",
                files.location()
            )));
        };
        let bar = Bar::bytes("verifying");
        checkpoint::verify(&files, manifest, &mut |done, total| {
            bar.set_total(total);
            bar.set(done);
        })?;
    }

    let (checkpoint, config) = (&source.checkpoint, &source.config);
    // Tensors, weights and bytes of each scheme.
    let mut by_scheme: BTreeMap<String, (u64, u64, u64)> = BTreeMap::new();
    for tensor in weights.tensors.iter() {
        let sum = by_scheme.entry(tensor.scheme()?.to_string()).or_default();
        *sum = (sum.0 + 1, sum.1 + tensor.num_elements() as u64, sum.2 + tensor.stored_bytes());
    }
    // Tensors and bytes of the vision tower.
    let tower = source.tower(&weights).map(|tower| {
        tower.map(|(_, tensors)| (tensors.len(), tensors.iter().map(Tensor::stored_bytes).sum::<u64>()))
    });
    let parameters: u64 = by_scheme.values().map(|(_, weights, _)| weights).sum();
    let tool_calls = match load::tokenizer_and_template(&files) {
        Ok(Some((tokenizer, template))) => Some(CallFormat::of(&template, &tokenizer).syntax.name.to_owned()),
        Ok(None) => None,
        Err(error) => Some(format!("unknown: {error}")),
    };
    let full_attention_layers = config.layers.iter().filter(|layer| layer.window.is_none()).count();
    if args.json {
        let tensors: Vec<_> = weights
            .tensors
            .iter()
            .map(|t| Ok(json!({"name": t.name, "shape": t.shape, "scheme": t.scheme()?.to_string(), "bytes": t.stored_bytes(), "file": t.file})))
            .collect::<Result<_, Error>>()?;
        let line = json!({
            "model": files.location(),
            "architecture": config.arch.name,
            "format": checkpoint.format(),
            "synthetic": checkpoint.synthetic(),
            "parameters": parameters,
            "bytes": checkpoint.total_bytes(),
            "num_hidden_layers": config.layers.len(),
            "full_attention_layers": full_attention_layers,
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "experts": config.mixture.map(|Mixture { experts, intermediate_size, .. }| json!({
                "num_experts": experts.count,
                "num_experts_per_tok": experts.per_token,
                "moe_intermediate_size": intermediate_size,
            })),
            "heads": config.distinct_heads().iter().map(|heads| json!({
                "num_attention_heads": heads.num_attention_heads,
                "num_key_value_heads": heads.num_key_value_heads,
                "head_dim": heads.head_dim,
                "layers": config.layers.iter().filter(|layer| layer.heads == *heads).count(),
            })).collect::<Vec<_>>(),
            "num_attention_heads": config.heads().num_attention_heads,
            "num_key_value_heads": config.heads().num_key_value_heads,
            "head_dim": config.heads().head_dim,
            "sliding_window": config.window(),
            "vocab_size": config.vocab_size,
            "max_position_embeddings": config.max_position_embeddings,
            "tool_call_parser": tool_calls,
            "vision_tower": tower.as_ref().ok().and_then(Option::as_ref).map(|(tensors, bytes)| json!({
                "tensors": tensors,
                "bytes": bytes,
            })),
            "skipped_vision_tensors": weights.skipped_vision,
            "defects": weights.defects(),
            "growth": weights.growth(QuantizeMode::None),
            "schemes": by_scheme
                .iter()
                .map(|(scheme, (tensors, weights, bytes))| json!({"scheme": scheme, "tensors": tensors, "weights": weights, "bytes": bytes}))
                .collect::<Vec<_>>(),
            "verified": args.verify,
            "tensors": if args.tensors { Some(tensors) } else { None },
        });
        return print(&format!("{line}\n"));
    }
    let mut text = format!("{}\n", files.location());
    let mut line = |name: &str, value: String| {
        text.push_str(&format!("  {name:<12} {}\n", visible(&value)));
    };
    line("architecture", config.arch.name.into());
    line("format", checkpoint.format().to_string());
    if let Some(synthetic) = checkpoint.synthetic() {
        line(
            "synthetic",
            format!("random weights in the shape of {}, seed {}", synthetic.shape, synthetic.seed),
        );
    }
    if let Some(manifest) = &manifest {
        line("source", manifest.source.clone());
        line("writer", manifest.writer.clone());
    }
    line(
        "layers",
        match config.window() {
            Some(window) => format!(
                "{} ({full_attention_layers} with full attention, the others with a sliding window of {window} tokens)",
                config.layers.len()
            ),
            None => format!("{full_attention_layers}, all with full attention"),
        },
    );
    let heads = config.distinct_heads().into_iter().map(|heads| {
        let AttentionHeads { num_attention_heads, num_key_value_heads, head_dim } = heads;
        format!("{num_attention_heads} heads and {num_key_value_heads} KV heads of {head_dim}")
    });
    line(
        "shape",
        format!(
            "hidden {}, feed-forward {}, {}, vocabulary {}",
            config.hidden_size,
            config.intermediate_size,
            heads.collect::<Vec<_>>().join(" or "),
            config.vocab_size
        ),
    );
    if let Some(Mixture { experts, intermediate_size, .. }) = config.mixture {
        let [count, used] = [experts.count, experts.per_token];
        line("experts", format!("{count} of width {intermediate_size}, of which a token uses {used}"));
    }
    line("context", format!("{} tokens at most", config.max_position_embeddings));
    if let Some(calls) = tool_calls {
        line("tool calls", calls);
    }
    line("weights", format!("{:.3} billion in {}", parameters as f64 / 1e9, bytes(checkpoint.total_bytes())));
    for (scheme, (tensors, weights, stored)) in by_scheme {
        line(
            "",
            format!(
                "{scheme:<14} {tensors:5} tensors, {:9.3} billion, {}",
                weights as f64 / 1e9,
                bytes(stored)
            ),
        );
    }
    if let Some(growth) = weights.growth(QuantizeMode::None) {
        line("on device", growth);
    }
    let (used, used_bytes) = match tower {
        Ok(Some((tensors, stored))) => {
            line("vision tower", format!("{tensors} tensors, {}", bytes(stored)));
            (tensors, stored)
        }
        Ok(None) => (0, 0),
        Err(why) => {
            line("vision tower", format!("not used: {why}"));
            (0, 0)
        }
    };
    let (unused, unused_bytes) = (weights.skipped_vision - used, weights.skipped_bytes - used_bytes);
    if unused > 0 {
        line("skipped", format!("{unused} tensors of images and sound, {}", bytes(unused_bytes)));
    }
    for (i, defect) in weights.defects().into_iter().enumerate() {
        line(if i == 0 { "defects" } else { "" }, defect);
    }
    line(
        "checksums",
        match (&manifest, args.verify) {
            (None, _) => "none".into(),
            (Some(manifest), false) => {
                format!("of {} files; --verify checks them", manifest.files.len())
            }
            (Some(manifest), true) => format!("of {} files, all correct", manifest.files.len()),
        },
    );
    if args.tensors {
        for t in weights.tensors.iter() {
            text.push_str(&format!(
                "  {:<14} {:>14} {:>10}  {}\n",
                t.scheme()?.to_string(),
                format!("{:?}", t.shape),
                bytes(t.stored_bytes()),
                visible(t.name)
            ));
        }
    }
    print(&text)
}
