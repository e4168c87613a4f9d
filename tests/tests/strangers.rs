//! A second user of the machine tries to get in: each attempt is made by a process of another user id.
//!
//! These tests must run as root to become somebody else; where they cannot, they say so and pass. The
//! other user is nobody special: root can do all of it, and is not kept out.

use std::fs::{self, Permissions};
use std::io::{BufRead as _, BufReader, Read as _};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use sublet_tests::Outcome;
use tempfile::TempDir;
use tenants::coordinator::{Coordinator, Options, Outcome as Done};
use tenants::identity::TenantName;
use tenants::member::{Member, MemberConfig};
use tenants::run_dir::RunDir;
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
    #[expect(clippy::print_stderr, reason = "a test that could not run says so")]
    fn new() -> Outcome<Option<Self>> {
        let place = tempfile::tempdir()?;
        fs::set_permissions(place.path(), Permissions::from_mode(0o1777))?;
        let program = place.path().join("stranger");
        // Where it was built, others may not look.
        fs::copy(env!("CARGO_BIN_EXE_sublet-stranger"), &program)?;
        fs::set_permissions(&program, Permissions::from_mode(0o755))?;
        let listed = stranger(&program).args(["list", "/"]).output();
        let able = listed.as_ref().is_ok_and(|output| output.stdout.starts_with(b"done"));
        if !able {
            let own = nix::unistd::geteuid();
            eprintln!(
                "NOT RUN: user {own} cannot become user {OTHER_UID} here ({listed:?}); run as root"
            );
            return Ok(None);
        }
        let run_dir = RunDir::open(Some(place.path().join("run")), None)?;
        let config =
            MemberConfig::new(run_dir.clone(), TenantName::new("train")?, "a member", "0.1.0");
        let driver = SimDriver::new(SimNode::private(&[64 << 20])?, SimOptions::default());
        driver.make_current(DeviceOrdinal(0))?;
        let member = Member::join(config, Arc::new(driver))?;
        Ok(Some(Self { run_dir, member, program, place }))
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
        fs::set_permissions(self.member.socket_path(), Permissions::from_mode(0o777))?;
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
        let mut connection = Connection::connect(self.member.socket_path(), soon())?;
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
    let socket = stage.member.socket_path().to_owned();
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
        command.arg("redeem").args(stage.member.socket_path().parent());
        let output = command.stdin(Stdio::from(ticket)).output()?;
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    };
    let said = redeem(stage.member.issue_ticket(&stage.member.pool().enter(), handle)?)?;
    assert!(said.starts_with("refused") && said.contains(PERMISSION), "{said}");
    // Even with the door open, the owner hangs up on it.
    stage.open_the_door()?;
    let said = redeem(stage.member.issue_ticket(&stage.member.pool().enter(), handle)?)?;
    assert_eq!(said.trim_end(), "done 0 bytes");
    stage.close_the_door()?;
    stage.all_is_well()
}

#[test]
fn an_agent_hangs_up_on_another_user_who_reaches_it() -> Outcome {
    let Some(stage) = Stage::new()? else { return Ok(()) };
    stage.open_the_door()?;
    let socket = stage.member.socket_path().to_owned();
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
