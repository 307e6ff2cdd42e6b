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

    fn answer(&mut self) -> Result<Answer<'static>, RunnerError> {
        match self.connection.receive(self.patience)? {
            Answer::Failed(error) => {
                self.connection.give_up();
                Err(error)
            }
            answer => Ok(answer),
        }
    }

    /// Sends a call. If the child has ended, the error is the last failure that it sent, if it sent one.
    fn call(&mut self, call: &Call) -> Result<(), RunnerError> {
        self.connection.send(call).map_err(|gone| match self.connection.last_words() {
            Some(Answer::Failed(error)) => error,
            _ => gone.into(),
        })
    }

    fn unexpected(&mut self) -> RunnerError {
        self.connection.give_up();
        RunnerError::Lost("the process that drives it answered another question".into())
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
        self.call(&Call::Wait)?;
        match self.answer()? {
            Answer::Sampled(sampled, attention_path) => {
                self.attention_path = attention_path;
                Ok(sampled)
            }
            _ => Err(self.unexpected()),
        }
    }

    fn attention_path(&self) -> u32 {
        self.attention_path
    }

    fn has_draft(&self) -> bool {
        self.has_draft
    }

    fn draft(&mut self, requests: &[DraftRequest]) -> Result<Vec<Vec<u32>>, RunnerError> {
        self.call(&Call::Draft(Borrowed(requests)))?;
        match self.answer()? {
            Answer::Drafted(tokens) => Ok(tokens),
            _ => Err(self.unexpected()),
        }
    }

    fn encode_image(&mut self, slot: u32, size: [usize; 2], pixels: &[u8]) -> Result<(), RunnerError> {
        self.call(&Call::EncodeImage(slot, size, Bytes(Borrowed(pixels))))?;
        match self.answer()? {
            Answer::Encoded => Ok(()),
            _ => Err(self.unexpected()),
        }
    }

    fn read_blocks(&mut self, blocks: &[PoolBlock]) -> Result<Vec<u8>, RunnerError> {
        self.call(&Call::ReadBlocks(Borrowed(blocks)))?;
        match self.answer()? {
            Answer::Blocks(bytes) => Ok(bytes.0.into_owned()),
            _ => Err(self.unexpected()),
        }
    }

    fn write_blocks(&mut self, blocks: &[PoolBlock], bytes: &[u8]) -> Result<(), RunnerError> {
        self.call(&Call::WriteBlocks(Borrowed(blocks), Bytes(Borrowed(bytes))))?;
        match self.answer()? {
            Answer::Written => Ok(()),
            _ => Err(self.unexpected()),
        }
    }

    fn probe(&mut self) -> Result<(), RunnerError> {
        self.call(&Call::Probe)?;
        match self.answer()? {
            Answer::Probed => Ok(()),
            _ => Err(self.unexpected()),
        }
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
