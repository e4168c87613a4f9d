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
use std::process::{Command, ExitCode, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::sys::socket::{ControlMessage, MsgFlags, UnixAddr, sendmsg};
use nix::unistd::{Gid, Uid};
use tenants::identity::{MemberId, TenantName};
use tenants::member::{Member, MemberConfig};
use tenants::run_dir::RunDir;
use tenants::ticket::Ticket;
use tenants::transport::frame::encode;
use tenants::transport::{Connection, poll_until};
use tenants::wire::{Borrower, FDS_PER_MESSAGE_MAX, FetchFds, FetchPurpose, Reply, Request};
use vmm_pool::driver::sim::{GRANULARITY_BYTES, SimDriver, SimNode, SimOptions};
use vmm_pool::driver::{AllocationProp, DeviceOrdinal, Driver as _};
use vmm_pool::{AllocationId, Class};

/// How long the other side may take to hang up on us.
const PATIENCE: Duration = Duration::from_secs(20);
/// Connections of a flood, and descriptors with each message of it.
const FLOOD_CONNECTIONS: usize = 300;
const FLOOD_FDS: usize = 250;
/// How often a process is started to get an id again.
const REUSES_MAX: usize = 100;
/// A member that nobody but this program has made.
const FORGED: MemberId = MemberId(0xabc0_0000_0000_0000);

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
        "lend" => lend(first),
        "fetch" => fetch(first, &arguments[1..]),
        "dropped" => dropped(first, &arguments[1..]),
        "reuse" => reuse(first),
        "announce" => announce(first),
        "hold" => io::stdin().read_to_end(&mut Vec::new()).map(|_| String::new()),
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

/// Gives its user up for the one that comes first, and tries the rest.
fn dropped(user: &Path, rest: &[OsString]) -> io::Result<String> {
    let user = user.to_string_lossy().parse().map_err(io::Error::other)?;
    nix::unistd::setgid(Gid::from_raw(user))?;
    nix::unistd::setuid(Uid::from_raw(user))?;
    let attempt = rest.first().map(|word| word.to_string_lossy()).unwrap_or_default();
    tried(&attempt, rest.get(1..).unwrap_or_default())
}

/// A process of tenant `train`, and an allocation that it has.
fn lender(run_dir: &Path) -> io::Result<(Arc<Member<SimDriver>>, String)> {
    let run_dir = RunDir::open(Some(run_dir.to_owned()), None).map_err(io::Error::other)?;
    let tenant = TenantName::new("train").map_err(io::Error::other)?;
    let config = MemberConfig::new(run_dir, tenant, "a lender", "0.1.0");
    let driver = SimDriver::new(SimNode::private(&[64 << 20])?, SimOptions::default());
    driver.make_current(DeviceOrdinal(0)).map_err(io::Error::other)?;
    let member = Member::join(config, Arc::new(driver)).map_err(io::Error::other)?;
    let prop = AllocationProp::pinned_on(DeviceOrdinal(0));
    let class = Class { library: "test", ..Class::default() };
    let handle = member.pool().enter().create(GRANULARITY_BYTES, &prop, class);
    let handle = handle.map_err(io::Error::other)?;
    let ticket =
        member.sharing().issue_ticket(&member.pool().enter(), handle).map_err(io::Error::other)?;
    let ticket = Ticket::read(ticket.as_fd()).map_err(io::Error::other)?;
    let id = ticket.map(|ticket| u128::from_be_bytes(ticket.allocation.0)).unwrap_or_default();
    Ok((member, format!("{id:032x}")))
}

/// Is a process of a tenant until its standard input ends. Says where it listens, and which allocation it has.
fn lend(run_dir: &Path) -> io::Result<String> {
    let (member, allocation) = lender(run_dir)?;
    writeln!(io::stdout(), "{} {allocation}", member.presence().socket_path().display())?;
    io::stdin().read_to_end(&mut Vec::new())?;
    member.leave();
    Ok(String::new())
}

/// In a pid namespace of its own: a lender is asked by a process that has the id of a member which has ended, and whose
/// socket a child of that one holds open.
fn reuse(run_dir: &Path) -> io::Result<String> {
    let (member, allocation) = lender(run_dir)?;
    let program = std::env::current_exe()?;
    let attempt = |name: &str| {
        let mut command = Command::new(&program);
        command.arg(name).arg(member.presence().socket_path());
        command
    };
    let mut gone = attempt("announce").stdin(Stdio::piped()).spawn()?;
    // Kept, so that the child lives on.
    let _holds = gone.stdin.take();
    gone.wait()?;
    for _ in 0..REUSES_MAX {
        fs::write("/proc/sys/kernel/ns_last_pid", (gone.id() - 1).to_string())?;
        let mut fetch = attempt("fetch");
        fetch.args([&allocation, &FORGED.to_string()]).stdout(Stdio::piped());
        let next = fetch.spawn()?;
        let has_its_id = next.id() == gone.id();
        let said = next.wait_with_output()?.stdout;
        if has_its_id {
            member.leave();
            return Ok(String::from_utf8_lossy(&said).into_owned());
        }
    }
    Err(io::Error::other("the id was never given again"))
}

/// Makes a member's socket, gives it to a child that lives as long as standard input, and ends.
fn announce(socket: &Path) -> io::Result<String> {
    let listener = UnixListener::bind(socket.with_file_name(format!("{FORGED}.sock")))?;
    fcntl(&listener, FcntlArg::F_SETFD(FdFlag::empty()))?;
    Command::new(std::env::current_exe()?).args(["hold", "/"]).stdout(Stdio::null()).spawn()?;
    Ok(String::new())
}

/// Asks the owner that listens at `socket` for an allocation, as an importer: one of that id, or one that it announces
/// itself. A tenant and a family may follow, where those are others.
fn fetch(socket: &Path, rest: &[OsString]) -> io::Result<String> {
    let words: Vec<String> = rest.iter().map(|word| word.to_string_lossy().into_owned()).collect();
    let [allocation, importer, family @ ..] = words.as_slice() else {
        return Err(io::Error::other("an argument is missing"));
    };
    let number = |text: &str| u128::from_str_radix(text, 16).map_err(io::Error::other);
    let mut announced = None;
    if importer == "announced" {
        let own = socket.with_file_name(format!("{FORGED}.sock"));
        announced = Some(UnixListener::bind(own)?);
    }
    let importer = if announced.is_some() {
        FORGED
    } else {
        MemberId(u64::try_from(number(importer)?).map_err(io::Error::other)?)
    };
    let borrower = family.split_first().map(|(tenant, family)| Borrower {
        tenant: tenant.clone(),
        family: family.first().cloned(),
    });
    let deadline = Instant::now() + PATIENCE;
    let mut connection = Connection::connect(socket, deadline).map_err(io::Error::other)?;
    let mut told = Vec::new();
    let mut got = 0;
    for purpose in [FetchPurpose::Redeem { serial: 0 }, FetchPurpose::Again] {
        let question = Request::FetchFds(FetchFds {
            allocations: vec![AllocationId(number(allocation)?.to_be_bytes())],
            purpose,
            importer,
            borrower: borrower.clone(),
        });
        let answer = connection.exchange(&question, FDS_PER_MESSAGE_MAX, deadline);
        let (reply, fds) = answer.map_err(io::Error::other)?;
        got += fds.len();
        if let Reply::Failed(failure) = reply {
            told.push(failure.message);
        }
    }
    match told.pop() {
        Some(message) if got == 0 => Err(io::Error::other(message)),
        _ => Ok(format!("{got} descriptors")),
    }
}

/// Reads what a process holds open, as one that may trace it could.
fn descriptors(process: &Path) -> io::Result<String> {
    let count = fs::read_dir(process.join("fd"))?.count();
    File::open(process.join("mem"))?;
    Ok(count.to_string())
}
