//! Messages between two processes of one machine: over a socket, and through shared memory if they are long.
//!
//! Long messages go through a file in memory that both processes have open. Both write and read it with system calls. A
//! mapping would spare a copy, but a process that was killed in the middle of a write could then change memory that this
//! process holds a reference to.

use std::fs::File;
use std::io::{self, ErrorKind, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// The longest message that goes over the socket itself. A step that decodes a few sequences is shorter.
const INLINE_BYTES: usize = 8 << 10;
/// The longest message. A step of 64 sequences with masks has some MiB.
const MAX_BYTES: usize = 64 << 20;
/// Messages that one side may send before it hears from the other. Two steps with masks, and a wait, are five.
const SLOTS: u64 = 8;
/// A message is written as a whole, so its rest is there soon, or its writer is dead.
const REST: Duration = Duration::from_secs(5);
/// The most files that Linux sends in one message is 253.
const FILES_AT_ONCE: usize = 200;

/// One end of a channel.
pub struct Channel {
    socket: UnixStream,
    /// This side writes the first half of the slots, or the second.
    memory: File,
    is_first: bool,
    /// Long messages sent so far, and received.
    sent: u64,
    received: u64,
    buffer: Vec<u8>,
}

/// Length of a message, and whether it is in a slot of the memory.
const HEAD_BYTES: usize = 5;

impl Channel {
    /// The first end, and what the other process needs for the second: its socket.
    pub fn new() -> io::Result<(Self, UnixStream)> {
        let (socket, other) = UnixStream::pair()?;
        let memory = rustix::fs::memfd_create("unicorn-device", rustix::fs::MemfdFlags::CLOEXEC)?;
        let mut channel = Self::over(socket, File::from(memory), true)?;
        let memory = channel.memory.try_clone()?;
        channel.send_files(std::slice::from_ref(&memory))?;
        Ok((channel, other))
    }

    /// The second end, in the process that has it as its standard input.
    pub fn from_stdin() -> io::Result<Self> {
        Self::from_socket(UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?))
    }

    pub fn from_socket(socket: UnixStream) -> io::Result<Self> {
        let mut memory = receive_files(&socket, 1)?;
        Self::over(socket, memory.remove(0), false)
    }

    fn over(socket: UnixStream, memory: File, is_first: bool) -> io::Result<Self> {
        socket.set_read_timeout(Some(REST))?;
        Ok(Self { socket, memory, is_first, sent: 0, received: 0, buffer: Vec::new() })
    }

    /// Tells the other side that nothing more comes.
    pub(super) fn end(&self) -> io::Result<()> {
        self.socket.shutdown(Shutdown::Both)
    }

    pub(super) fn progress_counter(&self) -> io::Result<ProgressCounter> {
        self.memory.try_clone().map(ProgressCounter)
    }

    /// The last number of the other side's [`ProgressCounter`].
    pub(super) fn read_progress(&self) -> io::Result<u64> {
        let mut bytes = [0; 8];
        self.memory.read_exact_at(&mut bytes, PROGRESS)?;
        Ok(u64::from_ne_bytes(bytes))
    }

    /// Sends files, which [`Channel::receive_files`] takes.
    pub fn send_files(&mut self, files: &[impl AsFd]) -> io::Result<()> {
        for files in files.chunks(FILES_AT_ONCE) {
            let files: Vec<_> = files.iter().map(AsFd::as_fd).collect();
            let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILES_AT_ONCE))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            assert!(control.push(SendAncillaryMessage::ScmRights(&files)), "there is room");
            sendmsg(&self.socket, &[IoSlice::new(&[0])], &mut control, SendFlags::NOSIGNAL)?;
        }
        Ok(())
    }

    pub fn receive_files(&mut self, count: usize) -> io::Result<Vec<File>> {
        receive_files(&self.socket, count)
    }

    /// Sends a message.
    pub fn send(&mut self, message: &impl Serialize) -> io::Result<()> {
        self.buffer.clear();
        self.buffer.resize(HEAD_BYTES, 0);
        self.buffer =
            postcard::to_extend(message, std::mem::take(&mut self.buffer)).map_err(io::Error::other)?;
        let bytes = self.buffer.len() - HEAD_BYTES;
        assert!(bytes <= MAX_BYTES, "a message of {bytes} bytes");
        let is_long = bytes > INLINE_BYTES;
        self.buffer[..4].copy_from_slice(&(bytes as u32).to_ne_bytes());
        self.buffer[4] = is_long.into();
        if is_long {
            self.memory.write_all_at(&self.buffer[HEAD_BYTES..], slot(self.is_first, self.sent))?;
            self.sent += 1;
            self.buffer.truncate(HEAD_BYTES);
        }
        self.socket.write_all(&self.buffer)
    }

    /// Whether a message, or the other side's end, comes within `patience`.
    pub fn poll(&self, patience: Duration) -> io::Result<bool> {
        let patience =
            Timespec { tv_sec: patience.as_secs() as i64, tv_nsec: patience.subsec_nanos().into() };
        let mut polled = [PollFd::new(&self.socket, PollFlags::IN)];
        match poll(&mut polled, Some(&patience)) {
            Ok(ready) => Ok(ready > 0),
            Err(rustix::io::Errno::INTR) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// The next message; none if the other side has ended. Blocks until it is there.
    pub fn receive<T: DeserializeOwned>(&mut self) -> io::Result<Option<T>> {
        while !self.poll(Duration::from_secs(3600))? {}
        let mut head = [0; HEAD_BYTES];
        match self.socket.read_exact(&mut head) {
            Ok(()) => {}
            Err(error) if [ErrorKind::UnexpectedEof, ErrorKind::ConnectionReset].contains(&error.kind()) => {
                return Ok(None);
            }
            Err(error) => return Err(error),
        }
        let bytes = u32::from_ne_bytes([head[0], head[1], head[2], head[3]]) as usize;
        if bytes > MAX_BYTES {
            return Err(io::Error::other(format!("a message of {bytes} bytes")));
        }
        self.buffer.resize(bytes, 0);
        if head[4] == 0 {
            self.socket.read_exact(&mut self.buffer)?;
        } else {
            self.memory.read_exact_at(&mut self.buffer, slot(!self.is_first, self.received))?;
            self.received += 1;
        }
        match postcard::take_from_bytes(&self.buffer).map_err(io::Error::other)? {
            (message, []) => Ok(Some(message)),
            (_, rest) => Err(io::Error::other(format!("{} bytes behind a message", rest.len()))),
        }
    }
}

/// Where a side's long message of this number lies.
fn slot(is_first: bool, number: u64) -> u64 {
    let side = if is_first { 0 } else { SLOTS };
    (side + number % SLOTS) * MAX_BYTES as u64
}

/// Where the progress of the second side's device lies: behind all slots.
const PROGRESS: u64 = 2 * SLOTS * MAX_BYTES as u64;

/// The number by which the second side says how far its device is.
pub struct ProgressCounter(File);

impl ProgressCounter {
    pub fn write(&self, value: u64) -> io::Result<()> {
        self.0.write_all_at(&value.to_ne_bytes(), PROGRESS)
    }
}

fn receive_files(socket: &UnixStream, count: usize) -> io::Result<Vec<File>> {
    let mut files: Vec<OwnedFd> = Vec::new();
    while files.len() < count {
        let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILES_AT_ONCE))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let received =
            recvmsg(socket, &mut [IoSliceMut::new(&mut [0])], &mut control, RecvFlags::CMSG_CLOEXEC)?;
        if received.bytes == 0 {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                files.extend(rights);
            }
        }
    }
    Ok(files.into_iter().map(File::from).collect())
}

#[cfg(test)]
mod tests {
    use std::io::Seek;

    use super::*;

    fn pair() -> (Channel, Channel) {
        let (one, socket) = Channel::new().unwrap();
        (one, Channel::from_socket(socket).unwrap())
    }

    #[test]
    fn short_and_long_messages_come_in_their_order_both_ways() {
        let (mut one, mut other) = pair();
        let message = |n: usize| -> Vec<u32> { (0..n as u32).map(|i| i.wrapping_mul(0x9e37_79b9)).collect() };
        let lengths = [0, 1, INLINE_BYTES / 8, INLINE_BYTES, 300_000, 2, 70_000];
        for round in 0..5 {
            for n in lengths {
                one.send(&(round, message(n))).unwrap();
            }
            for n in lengths {
                assert!(other.poll(Duration::ZERO).unwrap());
                assert_eq!(other.receive::<(i32, Vec<u32>)>().unwrap(), Some((round, message(n))));
            }
            other.send(&message(100_000)).unwrap();
            assert_eq!(one.receive::<Vec<u32>>().unwrap(), Some(message(100_000)));
        }
        assert!(!one.poll(Duration::ZERO).unwrap() && !other.poll(Duration::ZERO).unwrap());
    }

    #[test]
    fn the_others_end_is_no_message_and_no_error() {
        let (mut one, other) = pair();
        drop(other);
        assert!(one.poll(Duration::ZERO).unwrap());
        assert_eq!(one.receive::<u32>().unwrap(), None);
        assert_eq!(one.send(&7u32).unwrap_err().kind(), ErrorKind::BrokenPipe);
        let (one, mut other) = pair();
        one.end().unwrap();
        assert_eq!(other.receive::<u32>().unwrap(), None);
    }

    #[test]
    fn what_is_no_such_message_is_an_error() {
        let (mut one, mut other) = pair();
        one.send(&"text").unwrap();
        assert!(other.receive::<(u64, u64, u64)>().is_err());
        let (mut one, mut other) = pair();
        one.socket.write_all(&[0xff; 9]).unwrap();
        assert!(other.receive::<u64>().is_err(), "a length beyond all messages");
    }

    #[test]
    fn files_go_along_and_stay_readable_when_they_are_deleted() {
        let (mut one, mut other) = pair();
        let mut files = Vec::new();
        for i in 0..FILES_AT_ONCE + 7 {
            let mut file = tempfile::tempfile().unwrap();
            write!(file, "{i}").unwrap();
            file.rewind().unwrap();
            files.push(file);
        }
        one.send_files(&files).unwrap();
        one.send(&"behind them").unwrap();
        drop(files);
        let came = other.receive_files(FILES_AT_ONCE + 7).unwrap();
        for (i, mut file) in came.into_iter().enumerate() {
            let mut text = String::new();
            file.read_to_string(&mut text).unwrap();
            assert_eq!(text, i.to_string());
        }
        assert_eq!(other.receive::<String>().unwrap().as_deref(), Some("behind them"));
    }

    #[test]
    fn progress_is_read_as_it_was_written() {
        let (one, other) = pair();
        assert!(one.read_progress().is_err(), "nothing was written yet");
        other.progress_counter().unwrap().write(77).unwrap();
        assert_eq!(one.read_progress().unwrap(), 77);
    }
}
