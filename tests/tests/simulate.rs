//! `sublet simulate`: it ends as its command does, and what it made ends with it.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;
use sublet_tests::{Outcome, Rank, Trouble};

/// An upper bound for a busy machine.
const SOON: Duration = Duration::from_mins(1);
/// Says where the machine is, and then waits.
const WAITS: &str = "echo ok ${SUBLET_RUN_DIR%/run}; exec sleep 1000";

/// The directory of the machine, which its command has told.
fn machine(told: &str) -> Outcome<PathBuf> {
    let dir = PathBuf::from(told);
    let is_whole = dir.join("node/dev0").is_dir() && dir.join("run").is_dir();
    if is_whole { Ok(dir) } else { Err(Trouble::new(format!("{told} is no machine"))) }
}

fn runs(pid: Pid) -> bool {
    kill(pid, None) != Err(Errno::ESRCH)
}

#[test]
fn a_simulation_exits_as_its_command() -> Outcome {
    for (script, code) in [("exit 0", 0), ("exit 7", 7), ("kill -KILL $$", 137), ("/no/such", 127)]
    {
        let mut command = Rank::simulated(script)?;
        assert_eq!(command.ends_within(SOON)?.code(), Some(code), "{script}");
        assert!(command.stderr().contains("1 simulated GPU of 64 MiB, until 'sh' ends"));
    }
    Ok(())
}

#[test]
fn a_machine_goes_with_its_command_and_so_do_processes_that_are_left() -> Outcome {
    // One ends when it is told to, one is not willing to, and one has left the session.
    let script = "sleep 1000 & first=$!
        sh -c \"trap '' TERM; sleep 1000\" & second=$!
        setsid -f sh -c 'echo $$ > $SUBLET_RUN_DIR/../third; exec sleep 1000'
        until [ -s $SUBLET_RUN_DIR/../third ]; do :; done
        echo ok ${SUBLET_RUN_DIR%/run} $first $second $(cat $SUBLET_RUN_DIR/../third)
        read line; exit 3";
    let mut command = Rank::simulated(script)?;
    let told = command.answer()?.text;
    let (dir, pids) = told.split_once(' ').unwrap_or_default();
    let dir = machine(dir)?;
    let pids = pids.split(' ').map(|pid| pid.parse().map(Pid::from_raw));
    let pids = pids.collect::<Result<Vec<_>, _>>()?;
    assert!(pids.len() == 3 && pids.iter().copied().all(runs), "{told}");
    assert_eq!(command.exit()?.code(), Some(3));
    assert!(!dir.exists());
    let left: Vec<_> = pids.into_iter().filter(|pid| runs(*pid)).collect();
    assert!(left.is_empty(), "{left:?}");
    Ok(())
}

#[test]
fn signals_end_the_command_and_the_machine_goes() -> Outcome {
    // Started in the background, this process may ignore it, and so would the command.
    signal_hook::flag::register_conditional_default(
        signal_hook::consts::SIGINT,
        Arc::new(AtomicBool::new(true)),
    )?;
    // Ctrl-C goes to all processes of the group.
    for (signal, is_for_all, code) in [(Signal::SIGTERM, false, 143), (Signal::SIGINT, true, 130)] {
        let mut command = Rank::simulated(WAITS)?;
        let dir = machine(&command.answer()?.text)?;
        let pid = Pid::from_raw(i32::try_from(command.pid())?);
        let send = if is_for_all { killpg } else { kill::<Signal> };
        send(pid, signal)?;
        assert_eq!(command.ends_within(SOON)?.code(), Some(code));
        assert!(!dir.exists());
    }
    Ok(())
}

#[test]
fn what_a_killed_simulation_left_goes_with_the_next() -> Outcome {
    let mut killed = Rank::simulated("echo ok ${SUBLET_RUN_DIR%/run}; read line")?;
    let dir = machine(&killed.answer()?.text)?;
    killed.kill()?;
    let mut next = Rank::simulated("echo ok ${SUBLET_RUN_DIR%/run}; read line")?;
    let other = machine(&next.answer()?.text)?;
    assert!(!dir.exists());
    // One that is in use stays.
    Rank::simulated("exit 0")?.ends_within(SOON)?;
    assert!(other.exists());
    next.exit()?;
    assert!(!Path::new(&other).exists());
    Ok(())
}
