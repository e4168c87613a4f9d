//! What happens during a command and is no failure of the machine: a second command, a process that is stopped
//! or gets a signal, a run directory that vanishes, sockets of processes that were killed.

use std::fs;
use std::io::ErrorKind;
use std::os::unix::net::UnixListener;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use sublet_tests::{Outcome, Trouble};
use tenants::scope::Scope;
use tenants::wire::{Action, MemberState};

use super::mishap::{Mishap, any_signal, let_time_pass};
use super::{Script, outline};
use crate::coordinate::{Request, Verdict, Way};
use crate::tally::Tally;

/// More than a tenant may have processes.
const DEAD_SOCKETS: usize = 1_100;
/// Longer than processes take to make their sockets again, and wait for those of others.
const NAMES_AGAIN: Duration = Duration::from_secs(20);
/// How often the removal of a directory begins again because somebody made a file in it.
const REMOVALS_MAX: usize = 100;

/// A whole pause or resume that met another command of its tenant, and what came of it.
#[derive(Clone, Debug)]
pub(super) struct Second {
    action: Action,
    verdict: Verdict,
}

impl Second {
    /// The state that it has brought the tenant to, if it succeeded.
    pub(super) fn brought(&self) -> Option<MemberState> {
        let state = match self.action {
            Action::Pause => MemberState::Paused,
            Action::Resume => MemberState::Active,
        };
        matches!(self.verdict, Verdict::Done { .. }).then_some(state)
    }

    pub(super) fn is_half_done(&self) -> bool {
        matches!(&self.verdict, Verdict::Refused(refusal) if !refusal.left_unchanged)
    }
}

impl Script {
    /// Now and then a second command, during one of the whole tenant whose tags are all back.
    pub(super) fn choose_rival(&mut self, tenant: usize, scope: &Scope, mishap: Mishap) -> Mishap {
        let tags_are_back = self.world.tenants[tenant].market.away.is_empty();
        let random = &mut self.world.random;
        let action = if random.bool() { Action::Pause } else { Action::Resume };
        let after = Duration::from_micros(random.u64(..20_000));
        if *scope != Scope::Whole || !tags_are_back {
            // What a second command brings about is known of whole ones alone.
            let is_of_whole = matches!(mishap, Mishap::NameGone { .. });
            return if is_of_whole { Mishap::None } else { mishap };
        }
        if mishap.is_none() && random.u8(..8) == 0 {
            return Mishap::SecondCommand { after, action };
        }
        if let Mishap::RunDirGone { after: gone, .. } = mishap
            && random.bool()
        {
            return Mishap::RunDirGone { after: gone, second: Some((after, action)) };
        }
        mishap
    }

    /// Asks, while something happens to the tenant.
    pub(super) fn ask_beside(
        &mut self,
        tenant: usize,
        way: Way,
        request: &Request,
        mishap: &Mishap,
    ) -> Outcome<Verdict> {
        let desk = self.world.desk.clone();
        std::thread::scope(|scope| {
            let asking = scope.spawn(move || desk.ask(way, request));
            let happened = self.happen(tenant, mishap);
            let verdict = asking.join();
            happened?;
            verdict.map_err(|_| Trouble::new("the thread that asks panicked"))?
        })
    }

    fn happen(&mut self, tenant: usize, mishap: &Mishap) -> Outcome {
        if let Mishap::Stopped { worker, after, lasting, .. } = mishap
            && let Some(worker) = self.world.worker(*worker)
        {
            let pid = Pid::from_raw(i32::try_from(worker.pid())?);
            let_time_pass(*after);
            kill(pid, Signal::SIGSTOP)?;
            let_time_pass(*lasting);
            kill(pid, Signal::SIGCONT)?;
        }
        if let Mishap::Signalled { worker, after } = mishap {
            let signal = any_signal(&mut self.world.random);
            let_time_pass(*after);
            if let Some(worker) = self.world.worker(*worker) {
                kill(Pid::from_raw(i32::try_from(worker.pid())?), signal)?;
            }
        }
        if let Mishap::SecondCommand { after, action } = mishap {
            self.ask_too(tenant, *after, *action)?;
        }
        if let Mishap::RunDirGone { after, second } = mishap {
            let_time_pass(*after);
            self.remove_run_dir()?;
            if let Some((after, action)) = second {
                self.ask_too(tenant, *after, *action)?;
            }
        }
        Ok(())
    }

    fn ask_too(&mut self, tenant: usize, after: Duration, action: Action) -> Outcome {
        let_time_pass(after);
        let request = Request::plain(&self.world.tenants[tenant].name, action);
        let verdict = self.world.desk.ask(Way::Library, &request)?;
        self.tell(&format!("  a second command, {action:?}: {}", outline(&verdict)));
        Tally::count(&mut self.world.tally.commands, "a second command", 1);
        self.second = Some(Second { action, verdict });
        Ok(())
    }

    /// As a cleaner of directories does, which goes on when somebody makes a file there meanwhile.
    fn remove_run_dir(&mut self) -> Outcome {
        for _ in 0..REMOVALS_MAX {
            match fs::remove_dir_all(&self.world.desk.run_dir_path) {
                Err(error) if error.kind() == ErrorKind::DirectoryNotEmpty => {}
                Err(error) if error.kind() != ErrorKind::NotFound => return Err(error.into()),
                Ok(()) | Err(_) => break,
            }
        }
        Tally::count(&mut self.world.tally.deals, "removes the run directory", 1);
        self.removed = Some(Instant::now());
        for tenant in &mut self.world.tenants {
            tenant.market.is_in_trouble();
        }
        Ok(())
    }

    /// For some time after the run directory was removed nobody knows of a name that is missing whether its process has ended.
    pub(super) fn names_may_be_missing(&self) -> bool {
        self.removed.is_some_and(|since| since.elapsed() < NAMES_AGAIN)
    }

    /// As a cleaner does that finds the socket old.
    pub(super) fn remove_name(&mut self, worker: u64) -> Outcome {
        let Some(tenant) = self.world.tenant_of(worker) else { return Ok(()) };
        let pid = self.world.worker(worker).map(|worker| worker.pid());
        let standing = self.world.standing(tenant)?;
        let member = standing.members.iter().find(|member| Some(member.member.pid) == pid);
        let dir = self.world.desk.run_dir.existing_tenant(&self.world.tenants[tenant].name)?;
        if let (Some(member), Some(dir)) = (member, dir) {
            fs::remove_file(dir.path().join(format!("{}.sock", member.member.id)))?;
            Tally::count(&mut self.world.tally.deals, "removes a name", 1);
            self.removed = Some(Instant::now());
        }
        Ok(())
    }

    /// Waits until all processes have taken their names again.
    pub(super) fn end_rivals(&mut self, mishap: &Mishap) -> Outcome {
        if matches!(mishap, Mishap::RunDirGone { .. } | Mishap::NameGone { .. }) {
            for tenant in 0..self.world.tenants.len() {
                self.world.until_all_answer(tenant)?;
            }
        }
        Ok(())
    }

    /// Leaves what processes leave that are killed.
    pub(super) fn leave_dead_sockets(&mut self, tenant: usize) -> Outcome {
        let name = &self.world.tenants[tenant].name;
        let Some(dir) = self.world.desk.run_dir.existing_tenant(name)? else { return Ok(()) };
        for _ in 0..DEAD_SOCKETS {
            let id = self.world.random.u64(..);
            drop(UnixListener::bind(dir.path().join(format!("{id:016x}.sock")))?);
        }
        Ok(())
    }
}
