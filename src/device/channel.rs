//! Messages and files between two processes of one machine. A short message is one packet of a socket.
//!
//! A long message goes through a file in memory that both processes have open. Both write and read it with system
//! calls. A mapping would save a copy, but then the other process could change memory that this process has a reference
//! to.

use std::fs::File;
use std::io::{self, ErrorKind, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::FallocateFlags;
use rustix::io::{Errno, retry_on_intr};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, Shutdown, SocketFlags, SocketType, recv, recvmsg, send, sendmsg,
    shutdown, socketpair,
};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// The longest message that goes over the socket itself. A step that decodes a few sequences is shorter.
const INLINE_BYTES: usize = 8 << 10;
/// The longest message. A step of 64 sequences with masks has some MiB.
const MAX_BYTES: usize = 64 << 20;
/// The memory of a longer message is freed when it is received. The masks of a step are shorter.
const KEPT_BYTES: usize = 4 << 20;
/// Messages that one side may send before it receives an answer. Two steps with masks, and a wait, are five.
const SLOTS: u64 = 8;
/// The most files that Linux sends in one message is 253.
const FILES_AT_ONCE: usize = 200;

/// One end of a channel.
pub struct Channel {
    socket: OwnedFd,
    /// This side writes the first half of the slots, or the second.
    memory: File,
    is_first: bool,
    /// The numbers of long messages that were sent and received.
    sent: u64,
    received: u64,
    buffer: Vec<u8>,
}

/// The first byte of a packet: a message follows.
const INLINE: u8 = 0;
/// The length of a message follows. The message is in a slot of the memory.
const IN_MEMORY: u8 = 1;
/// The number of files that are still to come follows. The next of them are attached to the packet.
const FILES: u8 = 2;

impl Channel {
    /// The first end, and the socket of the second end for the other process.
    pub fn new() -> io::Result<(Self, OwnedFd)> {
        let (socket, other) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        let memory = rustix::fs::memfd_create("unicorn-channel", rustix::fs::MemfdFlags::CLOEXEC)?;
        let mut channel = Self::over(socket, File::from(memory), true);
        let memory = channel.memory.try_clone()?;
        channel.send_files(std::slice::from_ref(&memory))?;
        Ok((channel, other))
    }

    /// The second end, over a socket of [`Channel::new`].
    pub fn from_socket(socket: OwnedFd) -> io::Result<Self> {
        let memory = receive_file(&socket)?;
        Ok(Self::over(socket, memory, false))
    }

    fn over(socket: OwnedFd, memory: File, is_first: bool) -> Self {
        Self { socket, memory, is_first, sent: 0, received: 0, buffer: Vec::new() }
    }

    /// Closes the channel for both sides.
    pub(super) fn end(&self) -> io::Result<()> {
        Ok(shutdown(&self.socket, Shutdown::Both)?)
    }

    /// Writes this sign, as the second side.
    pub(super) fn counter(&self, sign: Sign) -> io::Result<Counter> {
        Ok(Counter { memory: self.memory.try_clone()?, at: sign.place() })
    }

    /// The last number of the other side's [`Counter`]; `None` if it has not written one.
    pub(super) fn read(&self, sign: Sign) -> Option<u64> {
        let mut bytes = [0; 8];
        self.memory.read_exact_at(&mut bytes, sign.place()).ok()?;
        Some(u64::from_ne_bytes(bytes))
    }

    /// Sends files. One [`Channel::receive_files`] with the same number receives all of them.
    pub fn send_files(&mut self, files: &[impl AsFd]) -> io::Result<()> {
        let mut left = files;
        loop {
            let (now, later) = left.split_at(left.len().min(FILES_AT_ONCE));
            let now: Vec<_> = now.iter().map(AsFd::as_fd).collect();
            let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILES_AT_ONCE))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            if !now.is_empty() {
                assert!(control.push(SendAncillaryMessage::ScmRights(&now)), "there is room");
            }
            let count = u32::try_from(left.len()).expect("a process has fewer files open");
            let [a, b, c, d] = count.to_ne_bytes();
            let packet = [FILES, a, b, c, d];
            retry_on_intr(|| {
                sendmsg(&self.socket, &[IoSlice::new(&packet)], &mut control, SendFlags::NOSIGNAL)
            })?;
            left = later;
            if left.is_empty() {
                return Ok(());
            }
        }
    }

    /// Receives the files of one [`Channel::send_files`]. Another number of files than `count` is an error.
    pub fn receive_files(&mut self, count: usize) -> io::Result<Vec<File>> {
        receive_files(&self.socket, count)
    }

    /// Receives the file of a [`Channel::send_files`] with one file.
    pub fn receive_file(&mut self) -> io::Result<File> {
        receive_file(&self.socket)
    }

    /// Sends a message.
    pub fn send(&mut self, message: &impl Serialize) -> io::Result<()> {
        self.buffer.clear();
        self.buffer.push(INLINE);
        self.buffer =
            postcard::to_extend(message, std::mem::take(&mut self.buffer)).map_err(io::Error::other)?;
        let bytes = self.buffer.len() - 1;
        assert!(bytes <= MAX_BYTES, "a message of {bytes} bytes");
        if bytes > INLINE_BYTES {
            self.memory.write_all_at(&self.buffer[1..], slot(self.is_first, self.sent))?;
            self.sent += 1;
            self.free_buffer();
            self.buffer.clear();
            self.buffer.push(IN_MEMORY);
            self.buffer.extend((bytes as u32).to_ne_bytes());
        }
        self.send_packet(&self.buffer)
    }

    /// Frees the buffer after a very long message.
    fn free_buffer(&mut self) {
        if self.buffer.capacity() > KEPT_BYTES {
            self.buffer = Vec::new();
        }
    }

    /// The system sends a packet in one piece.
    fn send_packet(&self, packet: &[u8]) -> io::Result<()> {
        retry_on_intr(|| send(&self.socket, packet, SendFlags::NOSIGNAL))?;
        Ok(())
    }

    /// Whether a message arrives, or the other side ends, within `patience`.
    pub fn poll(&self, patience: Duration) -> io::Result<bool> {
        let patience =
            Timespec { tv_sec: patience.as_secs() as i64, tv_nsec: patience.subsec_nanos().into() };
        let mut polled = [PollFd::new(&self.socket, PollFlags::IN)];
        match poll(&mut polled, Some(&patience)) {
            Ok(ready) => Ok(ready > 0),
            Err(Errno::INTR) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Waits for the next message; `None` if the other side has ended.
    pub fn receive<T: DeserializeOwned>(&mut self) -> io::Result<Option<T>> {
        let message = self.receive_message();
        self.free_buffer();
        message
    }

    fn receive_message<T: DeserializeOwned>(&mut self) -> io::Result<Option<T>> {
        self.buffer.resize(1 + INLINE_BYTES, 0);
        let bytes = loop {
            match recv(&self.socket, &mut self.buffer[..], RecvFlags::TRUNC) {
                Ok((0, _)) => return Ok(None),
                Ok((_, bytes)) => break bytes,
                // CONNRESET comes once if the other side ended before it had read everything. Its messages follow.
                Err(Errno::INTR | Errno::CONNRESET) => {}
                Err(error) => return Err(error.into()),
            }
        };
        let packet = self.buffer.get(..bytes);
        let message = match packet {
            Some([INLINE, message @ ..]) => message,
            Some(&[IN_MEMORY, a, b, c, d]) => {
                let bytes = u32::from_ne_bytes([a, b, c, d]) as usize;
                if bytes > MAX_BYTES {
                    return Err(io::Error::other(format!("a message of {bytes} bytes")));
                }
                self.buffer.resize(bytes, 0);
                let slot = slot(!self.is_first, self.received);
                self.memory.read_exact_at(&mut self.buffer, slot)?;
                if bytes > KEPT_BYTES {
                    // The other side writes to this slot again only after several later messages. Without this, each slot
                    // would keep as much memory as its longest message had. An error wastes only memory.
                    let free = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                    let _ = rustix::fs::fallocate(&self.memory, free, slot, bytes as u64);
                }
                self.received += 1;
                &self.buffer
            }
            _ => return Err(io::Error::other("a packet that is not a message")),
        };
        match postcard::take_from_bytes(message).map_err(io::Error::other)? {
            (message, []) => Ok(Some(message)),
            (_, rest) => Err(io::Error::other(format!("{} bytes after a message", rest.len()))),
        }
    }
}

/// The offset of a side's long message with this number.
fn slot(is_first: bool, number: u64) -> u64 {
    let side = if is_first { 0 } else { SLOTS };
    (side + number % SLOTS) * MAX_BYTES as u64
}

/// A number that the second side changes while it is alive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sign {
    /// Its device makes progress.
    Progress,
    /// The process runs, even if its device does not.
    Beat,
}

impl Sign {
    /// The offset of the number in the memory: after all slots.
    fn place(self) -> u64 {
        2 * SLOTS * MAX_BYTES as u64 + 8 * self as u64
    }
}

/// Writes the number of a sign.
pub(super) struct Counter {
    memory: File,
    at: u64,
}

impl Counter {
    pub fn write(&self, value: u64) -> io::Result<()> {
        self.memory.write_all_at(&value.to_ne_bytes(), self.at)
    }
}

/// Each packet contains the number of files that are still to come, including its own files. This detects files that
/// the system dropped: it drops files if this process may not open more.
fn receive_files(socket: &OwnedFd, count: usize) -> io::Result<Vec<File>> {
    let mut files: Vec<File> = Vec::new();
    loop {
        let mut packet = [0; 5];
        let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILES_AT_ONCE))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut into = [IoSliceMut::new(&mut packet)];
        let received = retry_on_intr(|| recvmsg(socket, &mut into, &mut control, RecvFlags::CMSG_CLOEXEC))?;
        let left = match (received.bytes, packet) {
            (0, _) => return Err(ErrorKind::UnexpectedEof.into()),
            (5, [FILES, a, b, c, d]) => u32::from_ne_bytes([a, b, c, d]) as usize,
            _ => return Err(io::Error::other("a packet without files; expected files")),
        };
        let sent = files.len() + left;
        if sent != count {
            return Err(io::Error::other(format!("the other process sent {sent} files; expected {count}")));
        }
        let before = files.len();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                files.extend(rights.map(File::from));
            }
        }
        let (came, expected) = (files.len() - before, left.min(FILES_AT_ONCE));
        if came != expected {
            return Err(io::Error::other(format!(
                "{came} of {expected} files arrived: this process may not open more (`ulimit -n`)"
            )));
        }
        if files.len() == count {
            return Ok(files);
        }
    }
}

fn receive_file(socket: &OwnedFd) -> io::Result<File> {
    Ok(receive_files(socket, 1)?.remove(0))
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Seek, Write};
    use std::os::unix::fs::MetadataExt;

    use super::super::message::Bytes;
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
    fn very_long_messages_keep_no_memory() {
        let (mut one, mut other) = pair();
        for round in 0..=SLOTS {
            let message = vec![round as u8; 2 * KEPT_BYTES];
            one.send(&Bytes((&message).into())).unwrap();
            let came = other.receive::<Bytes<'_>>().unwrap().unwrap();
            assert!(came.0 == message);
            other.send(&came).unwrap();
            assert!(one.receive::<Bytes<'_>>().unwrap().unwrap().0 == message);
        }
        let kept = one.memory.metadata().unwrap().blocks() * 512;
        assert!(kept < KEPT_BYTES as u64, "{kept} bytes");
        let buffers = one.buffer.capacity().max(other.buffer.capacity());
        assert!(buffers <= KEPT_BYTES, "{buffers} bytes");
    }

    #[test]
    fn the_others_end_is_no_message_and_no_error() {
        let (mut one, other) = pair();
        drop(other);
        assert!(one.poll(Duration::ZERO).unwrap());
        assert_eq!(one.receive::<u32>().unwrap(), None);
        assert_eq!(one.send(&7u32).unwrap_err().kind(), ErrorKind::BrokenPipe);
        // It is not an error, either, if one side has not read everything.
        let (mut one, mut other) = pair();
        one.send(&7u32).unwrap();
        other.send(&"last words").unwrap();
        drop(other);
        assert_eq!(one.receive::<String>().unwrap().as_deref(), Some("last words"));
        assert_eq!(one.receive::<u32>().unwrap(), None);
        let (one, mut other) = pair();
        one.end().unwrap();
        assert_eq!(other.receive::<u32>().unwrap(), None);
    }

    #[test]
    fn what_is_no_such_message_is_an_error() {
        let (mut one, mut other) = pair();
        one.send(&"text").unwrap();
        assert!(other.receive::<(u64, u64, u64)>().is_err());
        for packet in
            [&[0xff; 9][..], &[IN_MEMORY], &[IN_MEMORY, 0xff, 0xff, 0xff, 0xff], &[INLINE; 2 + INLINE_BYTES]]
        {
            let (one, mut other) = pair();
            one.send_packet(packet).unwrap();
            assert!(other.receive::<u64>().is_err(), "{packet:?}");
        }
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
        one.send(&"after them").unwrap();
        drop(files);
        let came = other.receive_files(FILES_AT_ONCE + 7).unwrap();
        assert_eq!(came.len(), FILES_AT_ONCE + 7);
        for (i, mut file) in came.into_iter().enumerate() {
            let mut text = String::new();
            file.read_to_string(&mut text).unwrap();
            assert_eq!(text, i.to_string());
        }
        assert_eq!(other.receive::<String>().unwrap().as_deref(), Some("after them"));
    }

    #[test]
    fn each_send_of_files_is_received_alone() {
        let (mut one, mut other) = pair();
        let files = |n: usize| -> Vec<File> { (0..n).map(|_| tempfile::tempfile().unwrap()).collect() };
        let counts = [3, 0, FILES_AT_ONCE, 1, FILES_AT_ONCE + 1];
        for n in counts {
            one.send_files(&files(n)).unwrap();
        }
        for n in counts {
            assert_eq!(other.receive_files(n).unwrap().len(), n);
        }
        for (sent, count) in [(3, 2), (2, 3), (FILES_AT_ONCE + 1, FILES_AT_ONCE)] {
            let (mut one, mut other) = pair();
            one.send_files(&files(sent)).unwrap();
            assert!(other.receive_files(count).is_err(), "{sent} files are not {count}");
        }
        one.send_files(&files(1)).unwrap();
        other.receive_file().unwrap();
        for n in [0, 2] {
            one.send_files(&files(n)).unwrap();
            assert!(other.receive_file().is_err(), "{n} files are not one");
        }
        one.send_files(&files(1)).unwrap();
        assert!(other.receive::<Vec<u8>>().is_err(), "files are no message");
        one.send(&7u32).unwrap();
        assert!(other.receive_files(1).is_err(), "a message is no file");
    }

    #[test]
    fn each_sign_is_read_as_it_was_written() {
        let (one, other) = pair();
        other.counter(Sign::Beat).unwrap().write(77).unwrap();
        assert_eq!(one.read(Sign::Beat), Some(77));
        let (one, other) = pair();
        assert_eq!((one.read(Sign::Progress), one.read(Sign::Beat)), (None, None));
        other.counter(Sign::Progress).unwrap().write(78).unwrap();
        assert_eq!((one.read(Sign::Progress), one.read(Sign::Beat)), (Some(78), None));
    }
}
