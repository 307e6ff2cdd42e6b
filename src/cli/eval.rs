//! `unicorn eval`: the logits of given tokens, and how well a text is predicted.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use super::args;
use super::error::Error;
use super::generate::print;
use super::load::{self, Model};
use super::progress::Bar;
use crate::config::Config;

pub fn eval(config: &Config, args: args::Eval) -> Result<(), Error> {
    let files = load::files(&config.model)?;
    match args {
        args::Eval::Logits { tokens, output, .. } => {
            logits(load::model(&files, config, false)?, &tokens, &output)
        }
        args::Eval::Perplexity { text, .. } => {
            let read =
                std::fs::read_to_string(&text).map_err(|error| Error::File { path: text.clone(), error })?;
            perplexity(load::model(&files, config, false)?, &read, &text)
        }
    }
}

/// A file that could not be written to its end does not stay; a device like /dev/null does.
fn logits(mut model: Model, tokens: &[u32], output: &Path) -> Result<(), Error> {
    check(&model, tokens)?;
    write_logits(&mut model, tokens, output).inspect_err(|_| {
        if output.is_file() {
            drop(std::fs::remove_file(output));
        }
    })
}

/// Writes rows as they come: the logits of a long prompt do not fit everywhere at once.
fn write_logits(model: &mut Model, tokens: &[u32], output: &Path) -> Result<(), Error> {
    let (n, vocab) = (tokens.len(), model.vocab_size());
    let failed = |error| Error::File { path: output.to_owned(), error };
    let mut file = BufWriter::new(File::create(output).map_err(failed)?);
    file.write_all(&safetensors_header(n, vocab)).map_err(failed)?;

    let bar = Bar::tokens("computing", n as u64);
    let mut written = Ok(());
    model.runner.logits(tokens, &mut |start, rows| {
        assert_eq!(rows.len() % vocab, 0, "whole rows");
        bar.set((start + rows.len() / vocab) as u64);
        if written.is_ok() {
            written = file.write_all(bytemuck::cast_slice(rows));
        }
    })?;
    written.and_then(|()| file.flush()).map_err(failed)
}

/// `logits`, f32 [n, vocab], little endian as every machine this runs on; the data begins at a multiple of 8.
fn safetensors_header(n: usize, vocab: usize) -> Vec<u8> {
    let end = n * vocab * size_of::<f32>();
    let mut json =
        format!(r#"{{"logits":{{"dtype":"F32","shape":[{n},{vocab}],"data_offsets":[0,{end}]}}}}"#);
    json.extend(std::iter::repeat_n(' ', json.len().next_multiple_of(8) - json.len()));
    let mut header = (json.len() as u64).to_le_bytes().to_vec();
    header.extend(json.bytes());
    header
}

fn check(model: &Model, tokens: &[u32]) -> Result<(), Error> {
    let (vocab, context) = (model.vocab_size(), model.max_context());
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

/// The text in windows of the whole context, each beginning with `<bos>`, no token predicted twice.
fn perplexity(mut model: Model, text: &str, path: &Path) -> Result<(), Error> {
    let mut ids = model.tokenizer.encode(text, true)?;
    model.tokenizer.check_ids(&ids, model.vocab_size())?;
    let bos = model.bos_token_id;
    if ids.first() == Some(&bos) {
        ids.remove(0);
    }
    if ids.is_empty() {
        return Err(Error::Argument(format!("{}: the text is empty", path.display())));
    }
    // Each window begins with `<bos>`.
    let window_tokens = model.max_context().saturating_sub(1);
    if window_tokens == 0 {
        return Err(Error::Argument(
            "--context: a context of 1 token predicts nothing; expected at least 2".into(),
        ));
    }
    let (vocab, total) = (model.vocab_size(), ids.len());
    let bar = Bar::tokens("reading", total as u64);
    let (mut nll, mut done) = (0f64, 0);
    for window in ids.chunks(window_tokens) {
        let mut tokens = vec![bos];
        tokens.extend(window);
        // The row at a position predicts the token after it; the last row predicts nothing known.
        model.runner.logits(&tokens, &mut |start, rows| {
            for (row, target) in rows.chunks_exact(vocab).zip(&tokens[start + 1..]) {
                nll += negative_log_likelihood(row, *target);
                done += 1;
            }
            bar.set(done);
        })?;
    }
    drop(bar);
    assert_eq!(done as usize, total, "every token is predicted once");
    let mean = nll / total as f64;
    print(&format!("perplexity {:.4} (nll {mean:.5} per token, {total} tokens)\n", mean.exp()))
}

/// In nats, summed in f64.
fn negative_log_likelihood(row: &[f32], target: u32) -> f64 {
    let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = row.iter().map(|x| f64::from(x - max).exp()).sum();
    sum.ln() - f64::from(row[target as usize] - max)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn likelihoods_are_those_of_the_softmax() {
        let row = [1000.0, 1000.0, 1000.0 + 3f32.ln()];
        assert!((negative_log_likelihood(&row, 0) - 5f64.ln()).abs() < 1e-4);
        assert!((negative_log_likelihood(&row, 2) - (5.0 / 3.0f64).ln()).abs() < 1e-4);
    }

    #[test]
    fn the_header_is_what_safetensors_reads() {
        let mut file = safetensors_header(2, 3);
        file.extend(bytemuck::cast_slice(&[1f32, 2., 3., 4., 5., 6.]));
        let read = safetensors::SafeTensors::deserialize(&file).expect("a sound file");
        let tensor = read.tensor("logits").expect("the tensor");
        assert_eq!((tensor.shape(), tensor.data().len()), (&[2, 3][..], 24));
    }
}
