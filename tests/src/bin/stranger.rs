//! Another user of the machine, who tries what the tests tell it to.
//!
//! `sublet-stranger ATTEMPT ARGUMENT..` writes one line: `done`, with what it got, or `refused` and why.
//! Tests run a copy of it under another user id.

use std::ffi::OsString;
use std::fs::{self, DirBuilder, File};
use std::io::{self, Read as _, Write as _};
use std::os::fd::AsFd as _;
use std::os::unix::fs::{DirBuilderExt as _, symlink};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use nix::sys::socket::{ControlMessage, MsgFlags, UnixAddr, sendmsg};
use tenants::ticket::Ticket;
use tenants::transport::frame::encode;
use tenants::transport::poll_until;
use tenants::wire::{FetchFds, FetchPurpose, Request};

/// How long the other side may take to hang up on us.
const PATIENCE: Duration = Duration::from_secs(20);
/// Connections of a flood, and descriptors with each message of it.
const FLOOD_CONNECTIONS: usize = 300;
const FLOOD_FDS: usize = 250;

fn main() -> ExitCode {
    let mut arguments = std::env::args_os().skip(1);
    let attempt = arguments.next().unwrap_or_default();
    let paths: Vec<OsString> = arguments.collect();
    let text = match tried(&attempt.to_string_lossy(), &paths) {
        Ok(got) => format!("done {got}"),
        Err(error) => format!("refused {error}"),
    };
    match writeln!(io::stdout(), "{}", text.trim_end()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

fn tried(attempt: &str, arguments: &[OsString]) -> io::Result<String> {
    let missing = || io::Error::other(format!("{attempt}: an argument is missing"));
    let first = arguments.first().map(Path::new).ok_or_else(missing)?;
    match attempt {
        "list" => Ok(fs::read_dir(first)?.count().to_string()),
        "enter" => std::env::set_current_dir(first).map(|()| String::new()),
        "remove" => fs::remove_file(first).map(|()| String::new()),
        "move" => {
            let to = arguments.get(1).ok_or_else(missing)?;
            fs::rename(first, to).map(|()| String::new())
        }
        "write" => File::create(first).map(|_| String::new()),
        "mkdir" => DirBuilder::new().mode(0o700).create(first).map(|()| String::new()),
        "link" => {
            let target = arguments.get(1).ok_or_else(missing)?;
            symlink(target, first).map(|()| String::new())
        }
        "connect" => UnixStream::connect(first).map(|_| String::new()),
        "ask" => ask(first),
        "redeem" => redeem(first),
        "flood" => flood(first),
        "listen" => listen(first),
        "descriptors" => descriptors(first),
        _ => Err(io::Error::other(format!("{attempt}: no such attempt"))),
    }
}

/// Asks an agent who it is; says how many bytes it answered before it hung up.
fn ask(socket: &Path) -> io::Result<String> {
    let mut stream = UnixStream::connect(socket)?;
    let question = encode(&Request::Hello, 0).map_err(io::Error::other)?;
    // It may have hung up already.
    stream.write_all(&question).ok();
    heard(&mut stream)
}

fn heard(stream: &mut UnixStream) -> io::Result<String> {
    stream.set_read_timeout(Some(PATIENCE))?;
    let mut answer = Vec::new();
    match stream.read_to_end(&mut answer) {
        Err(error) if error.kind() != io::ErrorKind::ConnectionReset => Err(error),
        Ok(_) | Err(_) => Ok(format!("{} bytes", answer.len())),
    }
}

/// Uses the ticket that was passed to us as standard input, with its owner, who listens in `tenant_dir`.
fn redeem(tenant_dir: &Path) -> io::Result<String> {
    let ticket = Ticket::read(io::stdin().as_fd())
        .map_err(io::Error::other)?
        .ok_or_else(|| io::Error::other("standard input is no ticket"))?;
    let mut stream = UnixStream::connect(tenant_dir.join(format!("{}.sock", ticket.owner)))?;
    // The identity of a member is no secret that would help: it says whose it is.
    let allocations = vec![ticket.allocation];
    let request = Request::FetchFds(FetchFds {
        allocations,
        purpose: FetchPurpose::Redeem { serial: 0 },
        importer: ticket.owner,
        borrower: None,
    });
    let question = encode(&request, 0).map_err(io::Error::other)?;
    stream.write_all(&question).ok();
    heard(&mut stream)
}

/// Many connections, each with a message that brings as many descriptors as it can and ends half-way; all
/// are held until the other side has closed them.
fn flood(socket: &Path) -> io::Result<String> {
    let null = File::open("/dev/null")?;
    let fds = [std::os::fd::AsRawFd::as_raw_fd(&null); FLOOD_FDS];
    let mut streams = Vec::new();
    for _ in 0..FLOOD_CONNECTIONS {
        let stream = UnixStream::connect(socket)?;
        let rights = [ControlMessage::ScmRights(&fds)];
        let data = [io::IoSlice::new(b"SBLT")];
        let raw = std::os::fd::AsRawFd::as_raw_fd(&stream);
        // Fails when it was closed already.
        sendmsg::<UnixAddr>(raw, &data, &rights, MsgFlags::MSG_NOSIGNAL, None).ok();
        streams.push(stream);
    }
    for stream in &mut streams {
        heard(stream)?;
    }
    Ok(format!("{} connections, all closed", streams.len()))
}

/// Waits at `socket`, open to everybody, for one who calls; says what it was sent before the end.
fn listen(socket: &Path) -> io::Result<String> {
    let listener = UnixListener::bind(socket)?;
    fs::set_permissions(socket, std::os::unix::fs::PermissionsExt::from_mode(0o777))?;
    writeln!(io::stdout(), "listening")?;
    let mut fds = [nix::poll::PollFd::new(listener.as_fd(), nix::poll::PollFlags::POLLIN)];
    if !poll_until(&mut fds, Instant::now() + PATIENCE)? {
        return Err(io::ErrorKind::TimedOut.into());
    }
    heard(&mut listener.accept()?.0)
}

/// Reads what a process holds open, as one that may trace it could.
fn descriptors(process: &Path) -> io::Result<String> {
    let count = fs::read_dir(process.join("fd"))?.count();
    File::open(process.join("mem"))?;
    Ok(count.to_string())
}
