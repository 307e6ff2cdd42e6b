//! The parent's view of a [`Runner`] in a child process.
//!
//! The child writes the progress of its device to the shared memory. If the progress does not change for too long, the
//! device hangs.

use std::borrow::Cow::Borrowed;
use std::sync::Arc;
use std::time::Duration;

use super::message::{Answer, Bytes, Call, Ready, Words};
use super::{Connection, ConnectionError};
use crate::config::Courtesy;
use crate::model::{Batch, DraftRequest, Limits, PoolBlock, Runner, RunnerError, Sampled, Sampling, Ticket};

/// A runner in a child process.
pub struct DeviceProcess {
    connection: Connection,
    limits: Limits,
    has_draft: bool,
    attention_path: u32,
    next_ticket: u64,
    patience: Duration,
}

impl DeviceProcess {
    /// The runner of a child that has loaded its model. If the device finishes nothing for `patience` during a step, it
    /// hangs.
    pub fn new(mut connection: Connection, patience: Duration) -> Result<Self, RunnerError> {
        let Ready { limits, has_draft, attention_path } = connection.receive(patience)?;
        Ok(Self { connection, limits, has_draft, attention_path, next_ticket: 0, patience })
    }

    /// Sends a call that has an answer, and waits for it. `of` returns `None` for the answer to another call.
    fn ask<T>(
        &mut self,
        call: &Call,
        of: impl FnOnce(Answer<'static>) -> Option<T>,
    ) -> Result<T, RunnerError> {
        self.call(call)?;
        let error = match self.connection.receive(self.patience)? {
            Answer::Failed(error) => error,
            answer => match of(answer) {
                Some(answer) => return Ok(answer),
                None => RunnerError::Lost("the process that drives it answered another question".into()),
            },
        };
        self.connection.give_up();
        Err(error)
    }

    /// Sends a call. If the child has ended, the error is the last failure that it sent, if it sent one.
    fn call(&mut self, call: &Call) -> Result<(), RunnerError> {
        self.connection.send(call).map_err(|gone| match self.connection.last_words() {
            Some(Answer::Failed(error)) => error,
            _ => gone.into(),
        })
    }
}

impl Runner for DeviceProcess {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn submit(&mut self, batch: &Batch, sampling: &Sampling) -> Result<Ticket, RunnerError> {
        self.call(&Call::Submit(Borrowed(batch), Borrowed(sampling)))?;
        self.next_ticket += 1;
        Ok(Ticket(self.next_ticket))
    }

    fn masks(&mut self, ticket: &Ticket, words: &[Arc<[u32]>]) -> Result<(), RunnerError> {
        assert_eq!(ticket.0, self.next_ticket, "masks of another step than the last one");
        self.call(&Call::Masks(words.iter().map(|words| Words(Arc::clone(words))).collect()))
    }

    fn set_courtesy(&mut self, courtesy: Courtesy) -> Result<(), RunnerError> {
        self.call(&Call::Courtesy(courtesy))
    }

    fn wait(&mut self, _: Ticket) -> Result<Sampled, RunnerError> {
        let (sampled, attention_path) = self.ask(&Call::Wait, |answer| match answer {
            Answer::Sampled(sampled, attention_path) => Some((sampled, attention_path)),
            _ => None,
        })?;
        self.attention_path = attention_path;
        Ok(sampled)
    }

    fn attention_path(&self) -> u32 {
        self.attention_path
    }

    fn has_draft(&self) -> bool {
        self.has_draft
    }

    fn draft(&mut self, requests: &[DraftRequest]) -> Result<Vec<Vec<u32>>, RunnerError> {
        self.ask(&Call::Draft(Borrowed(requests)), |answer| match answer {
            Answer::Drafted(tokens) => Some(tokens),
            _ => None,
        })
    }

    fn encode_image(&mut self, slot: u32, size: [usize; 2], pixels: &[u8]) -> Result<(), RunnerError> {
        let call = Call::EncodeImage(slot, size, Bytes(Borrowed(pixels)));
        self.ask(&call, |answer| matches!(answer, Answer::Encoded).then_some(()))
    }

    fn read_blocks(&mut self, blocks: &[PoolBlock]) -> Result<Vec<u8>, RunnerError> {
        self.ask(&Call::ReadBlocks(Borrowed(blocks)), |answer| match answer {
            Answer::Blocks(bytes) => Some(bytes.0.into_owned()),
            _ => None,
        })
    }

    fn write_blocks(&mut self, blocks: &[PoolBlock], bytes: &[u8]) -> Result<(), RunnerError> {
        let call = Call::WriteBlocks(Borrowed(blocks), Bytes(Borrowed(bytes)));
        self.ask(&call, |answer| matches!(answer, Answer::Written).then_some(()))
    }

    fn probe(&mut self) -> Result<(), RunnerError> {
        self.ask(&Call::Probe, |answer| matches!(answer, Answer::Probed).then_some(()))
    }
}

impl From<ConnectionError> for RunnerError {
    fn from(error: ConnectionError) -> Self {
        match error {
            ConnectionError::Hung { seconds } => Self::Hung { seconds },
            gone => Self::Lost(gone.to_string()),
        }
    }
}
