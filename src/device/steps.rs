//! The loop of the child that executes the server's calls on a runner.

use std::io;
use std::sync::Arc;

use super::Channel;
use super::message::{Answer, Bytes, Call, Ready, Words};
use crate::model::{Runner, RunnerError};

/// Executes steps until the parent ends, or until the runner fails. A failure is sent to the parent.
pub fn serve(mut channel: Channel, runner: &mut dyn Runner) -> io::Result<()> {
    let attention_path = runner.attention_path();
    channel.send(&Ready {
        limits: runner.limits().clone(),
        has_draft: runner.has_draft(),
        attention_path,
    })?;
    let mut in_flight = std::collections::VecDeque::new();
    while let Some(call) = channel.receive::<Call>()? {
        let answer = match call {
            Call::Submit(batch, sampling) => {
                runner.submit(&batch, &sampling).map(|ticket| in_flight.push_back(ticket)).map(|()| None)
            }
            Call::Masks(words) => {
                let words: Vec<Arc<[u32]>> = words.into_iter().map(|Words(words)| words).collect();
                runner.masks(in_flight.back().expect("masks follow their step"), &words).map(|()| None)
            }
            Call::Courtesy(courtesy) => runner.set_courtesy(courtesy).map(|()| None),
            Call::Wait => {
                let ticket = in_flight.pop_front().expect("a wait follows its step");
                let sampled = runner.wait(ticket);
                sampled.map(|sampled| Some(Answer::Sampled(sampled, runner.attention_path())))
            }
            Call::Draft(requests) => runner.draft(&requests).map(|tokens| Some(Answer::Drafted(tokens))),
            Call::EncodeImage(slot, size, pixels) => {
                runner.encode_image(slot, size, &pixels.0).map(|()| Some(Answer::Encoded))
            }
            Call::ReadBlocks(blocks) => {
                runner.read_blocks(&blocks).map(|bytes| Some(Answer::Blocks(Bytes(bytes.into()))))
            }
            Call::WriteBlocks(blocks, bytes) => {
                runner.write_blocks(&blocks, &bytes.0).map(|()| Some(Answer::Written))
            }
            Call::Probe => runner.probe().map(|()| Some(Answer::Probed)),
        };
        match answer {
            Ok(Some(answer)) => channel.send(&answer)?,
            Ok(None) => {}
            Err(error) => return fail(&mut channel, error),
        }
    }
    Ok(())
}

/// Sends a failure to the parent, which then kills this process.
fn fail(channel: &mut Channel, error: RunnerError) -> io::Result<()> {
    channel.send(&Answer::Failed(error))?;
    // The channel must stay open until the parent has read the failure.
    while channel.receive::<Call>()?.is_some() {}
    Ok(())
}
