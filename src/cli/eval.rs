//! `unicorn eval`: writes the logits of given tokens, or the perplexity of a text.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use super::args;
use super::error::Error;
use super::load::{self, Model, Watch};
use super::progress::Bar;
use super::terminal::print;
use crate::config::Config;
use crate::file;
use crate::model::model_runner::ModelRunner;
use crate::model::{Limits, Runner};

/// Maximum bytes of a text to evaluate.
const MAX_TEXT_BYTES: u64 = 256 << 20;

pub fn eval(config: &Config, args: args::Eval) -> Result<(), Error> {
    let files = |evaluated: args::Evaluated| load::files_at(evaluated.model.as_ref(), &config.model);
    match args {
        args::Eval::Logits(args::EvalLogits { evaluated, tokens, output }) => {
            logits(load::runner(&files(evaluated)?, config)?, &tokens, &output)
        }
        args::Eval::Perplexity(args::EvalPerplexity { evaluated, text, .. }) => {
            let (files, read) = (files(evaluated)?, read_text(&text)?);
            perplexity(load::model(&files, config, Watch::Nothing)?, &read, &text)
        }
    }
}

/// Reads the text that a command evaluates.
pub fn read_text(path: &Path) -> Result<String, Error> {
    file::read_input(path, MAX_TEXT_BYTES).map_err(|error| Error::File { path: path.to_owned(), error })
}

/// Writes the logits. After an error, an incomplete file is removed, but not a device such as /dev/null.
fn logits(mut runner: ModelRunner, tokens: &[u32], output: &Path) -> Result<(), Error> {
    check(runner.limits(), tokens)?;
    write_logits(&mut runner, tokens, output).inspect_err(|_| {
        if output.is_file() {
            drop(std::fs::remove_file(output));
        }
    })
}

/// Writes the rows while they are computed, because all logits of a long prompt may not fit into memory.
fn write_logits(runner: &mut ModelRunner, tokens: &[u32], output: &Path) -> Result<(), Error> {
    let (n, vocab) = (tokens.len(), runner.limits().vocab_size);
    let failed = |error| Error::File { path: output.to_owned(), error };
    let mut file = BufWriter::new(File::create(output).map_err(failed)?);
    file.write_all(&safetensors_header(n, vocab)).map_err(failed)?;

    let bar = Bar::of("tokens", "computing", n as u64);
    let mut written = Ok(());
    runner.logits(tokens, &mut |start, rows| {
        assert_eq!(rows.len() % vocab, 0, "whole rows");
        bar.set((start + rows.len() / vocab) as u64);
        if written.is_ok() {
            written = file.write_all(bytemuck::cast_slice(rows));
        }
    })?;
    written.and_then(|()| file.flush()).map_err(failed)
}

/// The safetensors header of one tensor `logits`, f32 [n, vocab]. It is padded with blanks to a multiple of 8 bytes.
fn safetensors_header(n: usize, vocab: usize) -> Vec<u8> {
    let end = n * vocab * size_of::<f32>();
    let mut json =
        format!(r#"{{"logits":{{"dtype":"F32","shape":[{n},{vocab}],"data_offsets":[0,{end}]}}}}"#);
    json.extend(std::iter::repeat_n(' ', json.len().next_multiple_of(8) - json.len()));
    let mut header = (json.len() as u64).to_le_bytes().to_vec();
    header.extend(json.bytes());
    header
}

fn check(limits: &Limits, tokens: &[u32]) -> Result<(), Error> {
    let &Limits { vocab_size: vocab, max_context: context, .. } = limits;
    if let Some(id) = tokens.iter().find(|id| **id as usize >= vocab) {
        return Err(Error::Argument(format!("--tokens: {id} is outside the vocabulary of {vocab}")));
    }
    if tokens.is_empty() || tokens.len() > context {
        return Err(Error::Argument(format!(
            "--tokens: expected 1 to {context} tokens, got {}",
            tokens.len()
        )));
    }
    Ok(())
}

fn perplexity(mut model: Model, text: &str, path: &Path) -> Result<(), Error> {
    let ids = text_ids(&model, text, path)?;
    let windows = windows(&model, &ids)?;
    let total: usize = windows.iter().map(|window| window.len() - 1).sum();
    let bar = Bar::of("tokens", "reading", total as u64);
    let nll = predict(&mut model, &windows, &bar, &mut |_| {})?;
    drop(bar);
    let mean = nll / total as f64;
    print(&format!("perplexity {:.4} (nll {mean:.5} per token, {total} tokens)\n", mean.exp()))
}

/// The token ids of a text, without the id that the tokenizer puts in front of it. An empty text is an error.
pub fn text_ids(model: &Model, text: &str, path: &Path) -> Result<Vec<u32>, Error> {
    let tokenizer = &model.texts.tokenizer;
    let mut ids = tokenizer.encode(text, true)?;
    tokenizer.check_ids(&ids, model.vocab_size())?;
    ids.drain(..tokenizer.ids_in_front());
    if ids.is_empty() {
        return Err(Error::Argument(format!("{}: the text is empty", path.display())));
    }
    Ok(ids)
}

/// The windows of the context's length in which the model reads a text. Every window begins with one id more: the one
/// that the tokenizer puts in front of texts, or else the last one of the window before. In the second case, nothing
/// predicts the first id of the text.
pub fn windows(model: &Model, ids: &[u32]) -> Result<Vec<Vec<u32>>, Error> {
    let length = model.max_context().saturating_sub(1);
    if length == 0 {
        return Err(Error::Argument(
            "--context: a context of 1 token predicts nothing; expected at least 2".into(),
        ));
    }
    let windows = match model.texts.tokenizer.bos() {
        Some(bos) => ids.chunks(length).map(|window| [&[bos], window].concat()).collect(),
        None if ids.len() < 2 => {
            return Err(Error::Argument("the text is one token, which nothing predicts".into()));
        }
        None => {
            let starts = (0..ids.len() - 1).step_by(length);
            starts.map(|start| ids[start..ids.len().min(start + length + 1)].to_vec()).collect()
        }
    };
    Ok(windows)
}

/// Calls `each` with the logits that predict each id of these windows but the first, in order, and returns the sum of the
/// negative log likelihoods.
pub fn predict(
    model: &mut Model,
    windows: &[Vec<u32>],
    bar: &Bar,
    each: &mut dyn FnMut(&[f32]),
) -> Result<f64, Error> {
    let vocab = model.vocab_size();
    let mut nll = 0f64;
    for tokens in windows {
        let mut done = 1;
        // The row at a position predicts the token after it; the last row's token is unknown.
        model.runner.logits(tokens, &mut |start, rows| {
            for (row, target) in rows.chunks_exact(vocab).zip(&tokens[start + 1..]) {
                nll += negative_log_likelihood(row, *target);
                each(row);
                bar.advance(1);
                done += 1;
            }
        })?;
        assert_eq!(done, tokens.len(), "every token is predicted once");
    }
    Ok(nll)
}

/// Negative log likelihood of `target` in nats, summed in f64.
fn negative_log_likelihood(row: &[f32], target: u32) -> f64 {
    log_sum_exp(row) - f64::from(row[target as usize])
}

/// `KL(p || q)` of the softmaxes of two rows of logits, in nats, summed in f64.
pub fn divergence(p: &[f32], q: &[f32]) -> f64 {
    let (p_total, q_total) = (log_sum_exp(p), log_sum_exp(q));
    let term = |(p, q): (&f32, &f32)| {
        let (log_p, log_q) = (f64::from(*p) - p_total, f64::from(*q) - q_total);
        log_p.exp() * (log_p - log_q)
    };
    p.iter().zip(q).map(term).sum()
}

fn log_sum_exp(row: &[f32]) -> f64 {
    let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    row.iter().map(|x| f64::from(x - max).exp()).sum::<f64>().ln() + f64::from(max)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn negative_log_likelihood_equals_that_of_the_softmax() {
        let row = [1000.0, 1000.0, 1000.0 + 3f32.ln()];
        assert!((negative_log_likelihood(&row, 0) - 5f64.ln()).abs() < 1e-4);
        assert!((negative_log_likelihood(&row, 2) - (5.0 / 3.0f64).ln()).abs() < 1e-4);
    }

    #[test]
    fn divergence_equals_the_kl_divergence_of_the_softmaxes() {
        let (p, q) = ([7.0, 7.0 + 3f32.ln()], [-2.0, -2.0]); // 1/4 and 3/4, against 1/2 and 1/2
        let expected = 0.25 * 0.5f64.ln() + 0.75 * 1.5f64.ln();
        assert!((divergence(&p, &q) - expected).abs() < 1e-6);
        assert!(divergence(&p, &p).abs() < 1e-12);
    }

    #[test]
    fn the_safetensors_crate_reads_the_header() {
        let mut file = safetensors_header(2, 3);
        file.extend(bytemuck::cast_slice(&[1f32, 2., 3., 4., 5., 6.]));
        let read = safetensors::SafeTensors::deserialize(&file).expect("a sound file");
        let tensor = read.tensor("logits").expect("the tensor");
        assert_eq!((tensor.shape(), tensor.data().len()), (&[2, 3][..], 24));
    }
}
