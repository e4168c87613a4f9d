//! A worker as the simulation sees it.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use sublet_tests::{Outcome, Trouble, until};

use crate::orders::{Account, Answer, Deal, Item, Link, Order, Saved};
use crate::worker::Charter;

/// How long a worker may take for anything while its tenant is active.
const ANSWER_TIMEOUT: Duration = Duration::from_mins(1);

/// How long a worker whose socket has closed may take to end.
const ENDING_TIMEOUT: Duration = Duration::from_secs(1);

/// A running worker. Killed when dropped.
#[derive(Debug)]
pub(crate) struct Worker {
    pub(crate) number: u64,
    child: Child,
    link: Link,
    /// Orders whose answers have not been read.
    outstanding: Vec<u64>,
    /// Never killed, so that its footprint can be watched from start to end.
    pub(crate) is_veteran: bool,
    pub(crate) is_keeper: bool,
    pub(crate) account: Account,
    /// Its account when it had joined.
    pub(crate) joined_with: Account,
    fired: u64,
}

impl Worker {
    pub(crate) fn start(charter: &Charter, is_veteran: bool) -> Outcome<Self> {
        let (ours, theirs) = UnixStream::pair()?;
        let child = Command::new(std::env::current_exe()?)
            .arg("worker")
            .args(charter.to_words())
            // Deals are made by threads of their own; an arena of host memory for each would look like growth.
            .env("MALLOC_ARENA_MAX", "1")
            // And what a large buffer took goes back immediately, so that growth is growth.
            .env("MALLOC_MMAP_THRESHOLD_", "131072")
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .spawn()?;
        let mut worker = Self {
            number: charter.number,
            child,
            link: Link::new(ours)?,
            outstanding: Vec::new(),
            is_veteran,
            is_keeper: charter.is_keeper,
            account: Account::default(),
            joined_with: Account::default(),
            fired: 0,
        };
        // Its first answer says that it has joined.
        worker.joined_with = worker.check(&[], &[])?.clone();
        Ok(worker)
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    fn failed(&mut self, what: &str, trouble: &Trouble) -> Trouble {
        let number = self.number;
        // Its socket closes a little before the system knows of its end. One that lives needs no words.
        let has_ended = || Ok(self.child.try_wait()?.is_some());
        until("its end", ENDING_TIMEOUT, has_ended).ok();
        let status = self.child.try_wait().ok().flatten();
        let ending = status.map(|status| format!(" ({status})")).unwrap_or_default();
        Trouble::new(format!(
            "worker {number} (process {}) at {what}: {trouble}{ending}",
            self.pid()
        ))
    }

    /// Sends an order whose answer is read by [`Worker::answers`].
    pub(crate) fn send(&mut self, order: &Order) -> Outcome {
        let sent = self.link.send(order);
        let number = sent.map_err(|trouble| self.failed(&format!("{order:?}"), &trouble))?;
        self.outstanding.push(number);
        Ok(())
    }

    /// All answers that are outstanding.
    pub(crate) fn answers(&mut self) -> Outcome<Vec<Answer>> {
        let deadline = Instant::now() + ANSWER_TIMEOUT;
        let mut answers = Vec::new();
        for number in std::mem::take(&mut self.outstanding) {
            answers.push(self.answer(number, "work", deadline)?);
        }
        Ok(answers)
    }

    /// Sends an order and waits for its answer.
    pub(crate) fn obey(&mut self, order: &Order) -> Outcome<Answer> {
        let sent = self.link.send(order);
        let number = sent.map_err(|trouble| self.failed(&format!("{order:?}"), &trouble))?;
        self.answer(number, &format!("{order:?}"), Instant::now() + ANSWER_TIMEOUT)
    }

    fn answer(&mut self, number: u64, what: &str, deadline: Instant) -> Outcome<Answer> {
        let answer = self.link.answer(number, deadline);
        let answer = answer.map_err(|trouble| self.failed(what, &trouble))?;
        if let Answer::Violation(text) = answer {
            return Err(self.failed(what, &Trouble::new(text)));
        }
        Ok(answer)
    }

    /// Has it compare everything; its account is kept. Returns it.
    pub(crate) fn check(&mut self, away: &[String], open: &[u128]) -> Outcome<&Account> {
        let (away, open) = (away.to_vec(), open.to_vec());
        let answer = self.obey(&Order::Check { away, open })?;
        let Answer::Account(account) = answer else {
            return Err(Trouble::new(format!("{answer:?} instead of an account")));
        };
        self.account = account;
        Ok(&self.account)
    }

    /// Sends a deal for some time later, whose answer is read by [`Worker::answers`].
    pub(crate) fn send_deal(&mut self, after: Duration, deal: Deal) -> Outcome {
        let after_us = u64::try_from(after.as_micros())?;
        self.send(&Order::Trade { after_us, deal })
    }

    /// Makes a deal now.
    pub(crate) fn deal(&mut self, deal: Deal) -> Outcome<Answer> {
        self.obey(&Order::Trade { after_us: 0, deal })
    }

    /// What it has on record, in whatever state it is.
    pub(crate) fn inventory(&mut self) -> Outcome<Vec<Item>> {
        let answer = self.obey(&Order::Inventory)?;
        let Answer::Inventory(items) = answer else {
            return Err(Trouble::new(format!("{answer:?} instead of an inventory")));
        };
        Ok(items)
    }

    /// Where what it has saved lies.
    pub(crate) fn saved(&mut self) -> Outcome<Saved> {
        let answer = self.obey(&Order::Saved)?;
        let Answer::Saved(saved) = answer else {
            return Err(Trouble::new(format!("{answer:?} instead of what is saved")));
        };
        Ok(saved)
    }

    /// No call of it fails any more; returns how many did since it was last asked.
    pub(crate) fn fail_no_more(&mut self) -> Outcome<u64> {
        let answer = self.obey(&Order::FailNoMore)?;
        let Answer::Failed(fired) = answer else {
            return Err(Trouble::new(format!("{answer:?} instead of a count")));
        };
        let fresh = fired - self.fired;
        self.fired = fired;
        Ok(fresh)
    }

    /// Frees all its memory and ends. Returns its last account.
    pub(crate) fn leave(mut self, away: Vec<String>, open: Vec<u128>) -> Outcome<Account> {
        let answer = self.obey(&Order::Leave { away, open })?;
        let Answer::Account(account) = answer else {
            return Err(Trouble::new(format!("{answer:?} instead of a last account")));
        };
        // It ends with its input.
        self.link = Link::new(UnixStream::pair()?.0)?;
        let status = self.child.wait()?;
        if status.success() {
            Ok(account)
        } else {
            Err(Trouble::new(format!("worker {} ended with {status}", self.number)))
        }
    }

    /// Kills it (`kill -9`) and waits for its end.
    pub(crate) fn kill(&mut self) -> Outcome {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // Both fail only when it has ended and been waited for.
        self.child.kill().ok();
        self.child.wait().ok();
    }
}
