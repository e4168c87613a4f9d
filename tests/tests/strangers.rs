//! A second user of the machine tries to get in, and processes of our own user that are none of the tenant. Each attempt is
//! made by another process.
//!
//! Those with a second user or a pid namespace must run as root; where they cannot, they say so and pass. The other user is
//! nobody special: root can do all of it, and is not kept out.

use std::ffi::OsStr;
use std::fs::{self, Permissions};
use std::io::{BufRead as _, BufReader, Read as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use sublet_cuda_driver::{Accessors, Answer, ipc};
use sublet_tests::{Files, Outcome, Trouble};
use tempfile::TempDir;
use tenants::coordinator::{Coordinator, Options, Outcome as Done};
use tenants::identity::{FamilyName, TenantName};
use tenants::member::{Member, MemberConfig};
use tenants::run_dir::{RUN_DIR_VARIABLE, RunDir};
use tenants::ticket::Ticket;
use tenants::transport::{Connection, TransportError};
use tenants::wire::{Reply, Request};
use vmm_pool::Class;
use vmm_pool::driver::sim::{GRANULARITY_BYTES, SimDriver, SimNode, SimOptions};
use vmm_pool::driver::{AllocationProp, DeviceOrdinal, Driver as _};

/// The other user: any that is not ours, and that container runtimes map.
const OTHER_UID: u32 = 12_345;
const PERMISSION: &str = "Permission denied";

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

/// A member in a run directory under a place that everybody may enter, and a stranger at the door.
struct Stage {
    run_dir: RunDir,
    member: Arc<Member<SimDriver>>,
    program: PathBuf,
    /// Sticky and open to all, as `/tmp` is.
    place: TempDir,
}

impl Stage {
    /// None, and a line that says why, where this machine lets us become nobody else.
    fn new() -> Outcome<Option<Self>> {
        let place = tempfile::tempdir()?;
        fs::set_permissions(place.path(), Permissions::from_mode(0o1777))?;
        let program = place.path().join("stranger");
        // Where it was built, others may not look.
        fs::copy(env!("CARGO_BIN_EXE_sublet-stranger"), &program)?;
        fs::set_permissions(&program, Permissions::from_mode(0o755))?;
        let can_run = is_run(stranger(&program).args(["list", "/"]), "become another user");
        if !can_run {
            return Ok(None);
        }
        Self::set_up(place, program).map(Some)
    }

    /// The same with strangers of our own user.
    fn of_one_user() -> Outcome<Self> {
        Self::set_up(tempfile::tempdir()?, PathBuf::from(env!("CARGO_BIN_EXE_sublet-stranger")))
    }

    fn set_up(place: TempDir, program: PathBuf) -> Outcome<Self> {
        let run_dir = RunDir::open(Some(place.path().join("run")), None)?;
        let member = join(&run_dir, "train")?;
        Ok(Self { run_dir, member, program, place })
    }

    /// What a process of our own user that is in no tenant gets of `allocation`, if it asks as `importer`.
    fn fetched(&self, allocation: &str, importer: &str, family: &[&str]) -> Outcome<String> {
        let mut command = Command::new(&self.program);
        command.arg("fetch").arg(self.member.presence().socket_path()).args([allocation, importer]);
        said(command.args(family))
    }

    /// What the stranger's attempt came to.
    fn attempt(&self, words: &[&Path]) -> Outcome<String> {
        let output = stranger(&self.program).args(words).output()?;
        Ok(String::from_utf8_lossy(&output.stdout).trim_end().to_owned())
    }

    fn refused(&self, words: &[&Path], reason: &str) -> Outcome {
        let said = self.attempt(words)?;
        assert!(said.starts_with("refused") && said.contains(reason), "{words:?}: {said}");
        Ok(())
    }

    fn succeeded(&self, words: &[&Path]) -> Outcome<String> {
        let said = self.attempt(words)?;
        assert!(said.starts_with("done"), "{words:?}: {said}");
        Ok(said)
    }

    /// Lets everybody reach the member's socket, which nobody should ever do.
    fn open_the_door(&self) -> Outcome {
        for dir in [self.run_dir.path().to_owned(), self.run_dir.path().join("train")] {
            fs::set_permissions(dir, Permissions::from_mode(0o711))?;
        }
        fs::set_permissions(self.member.presence().socket_path(), Permissions::from_mode(0o777))?;
        Ok(())
    }

    fn close_the_door(&self) -> Outcome {
        for dir in [self.run_dir.path().join("train"), self.run_dir.path().to_owned()] {
            fs::set_permissions(dir, Permissions::from_mode(0o700))?;
        }
        Ok(())
    }

    /// The member answers, and its tenant can be paused and resumed.
    fn all_is_well(&self) -> Outcome {
        let mut connection = Connection::connect(self.member.presence().socket_path(), soon())?;
        let (reply, _) = connection.exchange(&Request::Hello, 0, soon())?;
        assert!(matches!(reply, Reply::Member(_)), "{reply:?}");
        let tenant = TenantName::new("train")?;
        let mut coordinator = Coordinator::new(self.run_dir.clone(), tenant, Options::default());
        assert!(matches!(coordinator.pause(&mut |_| {})?, Done::Completed(_)));
        assert!(matches!(coordinator.resume(&mut |_| {})?, Done::Completed(_)));
        Ok(())
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        self.member.leave();
    }
}

fn join(run_dir: &RunDir, tenant: &str) -> Outcome<Arc<Member<SimDriver>>> {
    let tenant = TenantName::new(tenant)?;
    let mut config = MemberConfig::new(run_dir.clone(), tenant, "a member", "0.1.0");
    config.family = Some(FamilyName::new("rl")?);
    let driver = SimDriver::new(SimNode::private(&[64 << 20])?, SimOptions::default());
    driver.make_current(DeviceOrdinal(0))?;
    Ok(Member::join(config, Arc::new(driver))?)
}

/// Can `attempt` be made here? Else a line says that it cannot.
#[expect(clippy::print_stderr, reason = "a test that could not run says so")]
fn is_run(attempt: &mut Command, what: &str) -> bool {
    let output = attempt.stdin(Stdio::null()).output();
    let is_run = output.as_ref().is_ok_and(|output| output.stdout.starts_with(b"done"));
    if !is_run {
        let own = nix::unistd::geteuid();
        eprintln!("NOT RUN: user {own} cannot {what} here ({output:?}); run as root");
    }
    is_run
}

/// The first line that `command` writes.
fn said(command: &mut Command) -> Outcome<String> {
    let output = command.stdin(Stdio::null()).output()?;
    Ok(String::from_utf8_lossy(&output.stdout).trim_end().to_owned())
}

/// Memory of `owner`, as strangers name it.
fn memory_of(owner: &Member<SimDriver>) -> Outcome<String> {
    let prop = AllocationProp::pinned_on(DeviceOrdinal(0));
    let class = Class { library: "test", ..Class::default() };
    let handle = owner.pool().enter().create(GRANULARITY_BYTES, &prop, class)?;
    let ticket = owner.sharing().issue_ticket(&owner.pool().enter(), handle)?;
    let ticket = Ticket::read(ticket.as_fd())?.ok_or_else(|| Trouble::new("it is no ticket"))?;
    Ok(format!("{:032x}", u128::from_be_bytes(ticket.allocation.0)))
}

/// In a pid namespace of its own, with its own `/proc`, as in a container.
fn in_a_container(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new("unshare");
    command.args(["--pid", "--fork", "--kill-child", "--mount-proc"]).arg(program);
    command
}

fn stranger(program: &Path) -> Command {
    let mut command = Command::new(program);
    command.uid(OTHER_UID).gid(OTHER_UID).current_dir("/").stdin(Stdio::null());
    command
}

#[test]
fn another_user_cannot_list_enter_or_change_our_directories() -> Outcome {
    let Some(stage) = Stage::new()? else { return Ok(()) };
    let run = stage.run_dir.path().to_owned();
    let tenant = run.join("train");
    let socket = stage.member.presence().socket_path().to_owned();
    for dir in [&run, &tenant] {
        stage.refused(&[Path::new("list"), dir], PERMISSION)?;
        stage.refused(&[Path::new("enter"), dir], PERMISSION)?;
        stage.refused(&[Path::new("mkdir"), &dir.join("infer")], PERMISSION)?;
        stage.refused(&[Path::new("link"), &dir.join("infer"), Path::new("/tmp")], PERMISSION)?;
        stage.refused(&[Path::new("write"), &dir.join("coordinator.lock")], PERMISSION)?;
    }
    stage.refused(&[Path::new("connect"), &socket], PERMISSION)?;
    stage.refused(&[Path::new("remove"), &socket], PERMISSION)?;
    // The place is open to all, but sticky: what is ours there stays there.
    stage.refused(&[Path::new("move"), &run, &run.with_file_name("gone")], "not permitted")?;
    stage.all_is_well()
}

#[test]
fn a_directory_or_link_that_another_user_has_put_in_our_place_is_refused() -> Outcome {
    let Some(stage) = Stage::new()? else { return Ok(()) };
    let place = stage.place.path();
    let open = |path: &Path| RunDir::open(Some(path.to_owned()), None).map(drop);
    let text = |path: &Path| open(path).expect_err("a stranger's place was taken").to_string();

    let made = place.join("made-first");
    stage.succeeded(&[Path::new("mkdir"), &made])?;
    let said = text(&made);
    assert!(said.contains("belongs to user 12345, not 0"), "{said}");
    // Nor is anything made below it.
    let said = text(&made.join("run"));
    assert!(said.contains("belongs to user 12345, who could replace"), "{said}");

    let target = place.join("target");
    fs::create_dir(&target)?;
    let link = place.join("link");
    stage.succeeded(&[Path::new("link"), &link, &target])?;
    let said = text(&link);
    assert!(said.contains("is a symbolic link"), "{said}");
    let said = text(&link.join("run"));
    assert!(said.contains("is a symbolic link of user 12345"), "{said}");
    assert_eq!(fs::read_dir(&target)?.count(), 0, "something was made behind the link");
    // The same link by our own hand is ours to make.
    let own = place.join("own-link");
    symlink(&target, &own)?;
    open(&own.join("run"))?;

    // Without the sticky bit, anybody could put another directory in our place at any time.
    fs::set_permissions(place, Permissions::from_mode(0o777))?;
    let said = text(stage.run_dir.path());
    assert!(said.contains("lets others replace what lies in it"), "{said}");
    Ok(())
}

#[test]
fn a_stolen_ticket_is_of_no_use_to_another_user() -> Outcome {
    let Some(stage) = Stage::new()? else { return Ok(()) };
    let prop = AllocationProp::pinned_on(DeviceOrdinal(0));
    let class = Class { library: "test", ..Class::default() };
    let handle = stage.member.pool().enter().create(GRANULARITY_BYTES, &prop, class)?;
    let redeem = |ticket: OwnedFd| -> Outcome<String> {
        let mut command = stranger(&stage.program);
        command.arg("redeem").args(stage.member.presence().socket_path().parent());
        let output = command.stdin(Stdio::from(ticket)).output()?;
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    };
    let said = redeem(stage.member.sharing().issue_ticket(&stage.member.pool().enter(), handle)?)?;
    assert!(said.starts_with("refused") && said.contains(PERMISSION), "{said}");
    // Even with the door open, the owner hangs up on it.
    stage.open_the_door()?;
    let said = redeem(stage.member.sharing().issue_ticket(&stage.member.pool().enter(), handle)?)?;
    assert_eq!(said.trim_end(), "done 0 bytes");
    stage.close_the_door()?;
    stage.all_is_well()
}

#[test]
fn an_agent_hangs_up_on_another_user_who_reaches_it() -> Outcome {
    let Some(stage) = Stage::new()? else { return Ok(()) };
    stage.open_the_door()?;
    let socket = stage.member.presence().socket_path().to_owned();
    assert_eq!(stage.succeeded(&[Path::new("ask"), &socket])?, "done 0 bytes");
    // Nor do many connections with many descriptors, held open, keep it from its work.
    let said = stage.succeeded(&[Path::new("flood"), &socket])?;
    assert_eq!(said, "done 300 connections, all closed");
    stage.close_the_door()?;
    stage.all_is_well()
}

#[test]
fn we_hang_up_on_another_user_who_listens_in_a_members_place() -> Outcome {
    let Some(stage) = Stage::new()? else { return Ok(()) };
    let trap = stage.place.path().join("trap.sock");
    let mut command = stranger(&stage.program);
    let mut child = command.arg("listen").arg(&trap).stdout(Stdio::piped()).spawn()?;
    let mut lines = BufReader::new(child.stdout.take().expect("a pipe"));
    let mut line = String::new();
    lines.read_line(&mut line)?;
    let error = Connection::connect(&trap, soon()).expect_err("a stranger was spoken to");
    assert!(
        matches!(error, TransportError::ForeignPeer { peer_uid: OTHER_UID, .. }),
        "{line}{error}"
    );
    let mut heard = String::new();
    lines.read_to_string(&mut heard)?;
    child.wait()?;
    assert_eq!(heard.trim_end(), "done 0 bytes");
    Ok(())
}

#[test]
fn another_user_cannot_look_into_our_process() -> Outcome {
    let Some(stage) = Stage::new()? else { return Ok(()) };
    let process = PathBuf::from(format!("/proc/{}", std::process::id()));
    stage.refused(&[Path::new("descriptors"), &process], PERMISSION)?;
    // Nor is there anything of ours where everybody looks: sockets have paths, and memory has none.
    let own = format!("{}", std::process::id());
    let abstract_sockets = fs::read_to_string("/proc/net/unix")?;
    let ours =
        abstract_sockets.lines().filter(|line| line.contains(" @") && line.contains("sublet"));
    assert_eq!(ours.count(), 0);
    let named = fs::read_dir("/dev/shm")?.flatten().map(|entry| entry.file_name());
    let ours: Vec<_> = named.filter(|name| name.to_string_lossy().contains(&own)).collect();
    assert!(ours.is_empty(), "{ours:?}");
    Ok(())
}

#[test]
fn a_process_that_asks_as_a_member_which_it_is_not_gets_no_memory() -> Outcome {
    let stage = Stage::of_one_user()?;
    let (peer, borrower) = (join(&stage.run_dir, "train")?, join(&stage.run_dir, "infer")?);
    let memory = memory_of(&stage.member)?;
    let own = std::process::id();
    for (importer, family) in [
        (stage.member.presence().id(), &[] as &[&str]),
        (peer.presence().id(), &[]),
        (borrower.presence().id(), &["infer", "rl"]),
    ] {
        let said = stage.fetched(&memory, &importer.to_string(), family)?;
        let tenant = family.first().unwrap_or(&"train");
        let expected = format!("which is process {own} (user ");
        assert!(said.starts_with("refused process "), "{said}");
        assert!(said.contains(&expected), "{said}");
        assert!(said.contains(&format!("(sublet run --tenant {tenant})")), "{said}");
    }
    // One that joins the tenant may have it, and ends.
    assert_eq!(stage.fetched(&memory, "announced", &[])?, "done 2 descriptors");
    let said = stage.fetched(&memory, "abc0000000000000", &[])?;
    assert!(said.contains("abc0000000000000 is no process of tenant train"), "{said}");
    // What it announces in one tenant is nothing in another.
    for (importer, family) in [("announced", ["infer", "rl"]), ("announced", ["../infer", "rl"])] {
        let said = stage.fetched(&memory, importer, &family)?;
        assert!(said.starts_with("refused") && !said.contains(".."), "{said}");
    }
    borrower.leave();
    peer.leave();
    stage.all_is_well()
}

#[test]
fn a_process_of_another_pid_namespace_may_pause_and_gets_neither_memory_nor_contents() -> Outcome {
    let stage = Stage::of_one_user()?;
    if !is_run(in_a_container(&stage.program).args(["list", "/"]), "make a pid namespace") {
        return Ok(());
    }
    let memory = memory_of(&stage.member)?;
    for importer in ["announced", &stage.member.presence().id().to_string()] {
        let mut command = in_a_container(&stage.program);
        command.arg("fetch").arg(stage.member.presence().socket_path()).args([&memory, importer]);
        let said = said(&mut command)?;
        assert!(said.starts_with("refused process "), "{said}");
        assert!(said.contains("which is not in its pid namespace"), "{said}");
    }
    let sublet = Files::from_environment()?.sublet;
    let loot = stage.place.path().join("loot");
    let save = [OsStr::new("save"), OsStr::new("train"), loot.as_os_str()];
    for (words, is_refused) in [
        (["pause", "train"].map(OsStr::new).as_slice(), false),
        (&save, true),
        (["resume", "train"].map(OsStr::new).as_slice(), false),
        (["ps"].map(OsStr::new).as_slice(), false),
    ] {
        let mut command = in_a_container(&sublet);
        let output = command.args(words).env("SUBLET_RUN_DIR", stage.run_dir.path()).output()?;
        assert_eq!(output.status.success(), !is_refused, "{words:?}: {output:?}");
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(said.contains("writes no saved contents for process"), is_refused, "{said}");
    }
    let left = fs::read_dir(&loot).map_or(0, Iterator::count);
    assert_eq!(left, 0, "contents were written");
    stage.all_is_well()
}

#[test]
fn an_owner_that_sees_no_id_of_who_asks_gives_it_nothing() -> Outcome {
    let stage = Stage::of_one_user()?;
    if !is_run(in_a_container(&stage.program).args(["list", "/"]), "make a pid namespace") {
        return Ok(());
    }
    // This process sees the lender, and is not seen.
    let mut lender = Lender::start(in_a_container(&stage.program).arg("lend"), &stage, "inside")?;
    let mut command = Command::new(&stage.program);
    command.arg("fetch").arg(&lender.socket).args([&lender.memory, "announced"]);
    let said = said(&mut command)?;
    let words = "gives no memory to a process of another pid namespace (user ";
    assert!(said.starts_with("refused") && said.contains(words), "{said}");
    lender.end()
}

#[test]
fn a_process_that_has_the_id_of_a_member_that_has_ended_gets_no_memory() -> Outcome {
    let stage = Stage::of_one_user()?;
    if !is_run(in_a_container(&stage.program).args(["list", "/"]), "make a pid namespace") {
        return Ok(());
    }
    let run_dir = stage.place.path().join("inside");
    let said = said(in_a_container(&stage.program).arg("reuse").arg(run_dir))?;
    assert!(
        said.contains("refused process ") && said.contains("is no process of tenant train"),
        "{said}"
    );
    Ok(())
}

#[test]
fn a_handle_of_more_memory_than_there_is_is_none_of_ours() -> Outcome {
    let stage = Stage::of_one_user()?;
    let member = &stage.member;
    let prop = AllocationProp::pinned_on(DeviceOrdinal(0));
    let class = Class { library: "test", ..Class::default() };
    let accessors = [DeviceOrdinal(0)];
    let block = member.pool().enter().block_allocate(1000, &prop, &accessors, class)?;
    let Answer::Done(good) = ipc::handle_of(member, block) else {
        panic!("no handle of {block:?}");
    };
    let open = |handle: &[u8; ipc::HANDLE_BYTES]| {
        ipc::try_open(member, &Accessors::default(), handle, DeviceOrdinal(0), "test")
    };
    assert!(matches!(open(&good), Some(Ok(_))));
    for asked_bytes in [GRANULARITY_BYTES + 1, u64::MAX] {
        let mut forged = good;
        forged[32..40].copy_from_slice(&asked_bytes.to_le_bytes());
        assert!(open(&forged).is_none(), "{asked_bytes}");
    }
    stage.all_is_well()
}

#[test]
fn processes_that_have_given_up_root_lend_to_each_other() -> Outcome {
    let Some(stage) = Stage::new()? else { return Ok(()) };
    let user = OTHER_UID.to_string();
    let mut command = Command::new(&stage.program);
    let mut lender = Lender::start(command.args(["dropped", &user, "lend"]), &stage, "dropped")?;
    let mut command = Command::new(&stage.program);
    command.args(["dropped", &user, "fetch"]).arg(&lender.socket);
    assert_eq!(said(command.args([&lender.memory, "announced"]))?, "done 2 descriptors");
    lender.end()
}

#[test]
fn root_sees_the_tenants_of_another_user_who_sees_none_of_roots() -> Outcome {
    let Some(stage) = Stage::new()? else { return Ok(()) };
    let sublet = stage.place.path().join("sublet");
    fs::copy(&Files::from_environment()?.sublet, &sublet)?;
    let mut command = stranger(&stage.program);
    // By it root finds the directory.
    command.arg("lend").env(RUN_DIR_VARIABLE, stage.place.path().join("theirs"));
    let mut lender = Lender::start(&mut command, &stage, "theirs")?;

    let mut command = Command::new(&sublet);
    command.args(["ps", "--all-users", "--json"]).env(RUN_DIR_VARIABLE, stage.run_dir.path());
    let seen = said(&mut command)?;
    let theirs = format!("\"{OTHER_UID}/train\"");
    assert!(seen.contains(&theirs) && seen.contains("\"root/train\""), "{seen}");
    assert!(seen.contains(&format!("\"pid\": {}", lender.child.id())), "{seen}");

    let mut command = stranger(&sublet);
    command.args(["ps", "--all-users", "--json"]);
    let refused = said(command.env(RUN_DIR_VARIABLE, stage.place.path().join("theirs")))?;
    assert!(refused.contains("put sudo before the command"), "{refused}");
    assert!(!refused.contains("root/train"), "{refused}");
    lender.end()
}

/// A process of a tenant of its own run directory.
struct Lender {
    child: Child,
    socket: PathBuf,
    memory: String,
}

impl Lender {
    fn start(command: &mut Command, stage: &Stage, name: &str) -> Outcome<Self> {
        let run_dir = stage.place.path().join(name);
        let mut child =
            command.arg(run_dir).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let mut line = String::new();
        let output = child.stdout.take().ok_or_else(|| Trouble::new("no pipe"))?;
        BufReader::new(output).read_line(&mut line)?;
        let words = line.trim_end().split_once(' ');
        let (socket, memory) = words.ok_or_else(|| Trouble::new("not both words"))?;
        Ok(Self { child, socket: PathBuf::from(socket), memory: memory.to_owned() })
    }

    fn end(&mut self) -> Outcome {
        drop(self.child.stdin.take());
        self.child.wait()?;
        Ok(())
    }
}
