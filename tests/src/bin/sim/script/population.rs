//! Who lives: processes join and leave tenants that are active and at rest, share memory, and die at rest.

use sublet_tests::Outcome;

use super::Script;

/// How many processes there are to be, and until which cycle.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Crowd {
    processes: usize,
    until: u64,
    has_been_full: bool,
}

impl Script {
    /// Brings the number of processes towards what it is to be; all active tenants are at rest.
    pub(super) fn populate(&mut self) -> Outcome {
        self.choose_crowd();
        let active: Vec<usize> = (0..self.world.tenants.len())
            .filter(|index| !self.world.tenants[*index].is_paused)
            .collect();
        if self.world.tenants[0].workers.is_empty() {
            self.join(0)?;
        }
        for index in &active {
            if self.world.processes() < self.crowd.processes {
                let missing = self.crowd.processes - self.world.processes();
                // A crowd comes together, since it does not stay long.
                let joining = self.world.random.usize(..=missing.div_ceil(active.len()) * 2);
                for _ in 0..joining.min(missing) {
                    self.join(*index)?;
                }
            } else if self.world.processes() > self.crowd.processes {
                let spare = self.world.processes() - self.crowd.processes;
                for _ in 0..spare {
                    self.one_leaves(*index)?;
                }
            }
        }
        for index in active {
            if self.world.tenants[index].workers.is_empty() {
                continue;
            }
            match self.world.random.u8(..100) {
                0..3 => self.join_if_room(index)?,
                3..5 => self.one_leaves(index)?,
                5..7 => self.one_dies_at_rest(index)?,
                _ => {}
            }
            self.gather(index)?;
        }
        Ok(())
    }

    fn choose_crowd(&mut self) {
        let cycles = self.world.tally.cycles;
        let limit = self.settings.processes_max;
        let random = &mut self.world.random;
        let is_time = !self.crowd.has_been_full && cycles * 2 >= self.settings.cycles;
        if cycles < self.crowd.until && !is_time {
            return;
        }
        let (processes, stay) = match random.u32(..1000) {
            _ if is_time => (limit, 4),
            0..700 => (random.usize(1..=6), random.u64(10..40)),
            700..960 => (random.usize(4..=12), random.u64(5..20)),
            960..992 => (random.usize(12..=24), random.u64(3..8)),
            _ => (limit, 3),
        };
        self.crowd.has_been_full |= is_time;
        self.crowd.processes = processes.min(limit);
        self.crowd.until = cycles + stay;
        self.tell(&format!("{processes} processes from here on"));
    }

    fn join(&mut self, tenant: usize) -> Outcome {
        let crowd = self.crowd.processes.max(1);
        let number = self.world.join(tenant, crowd)?;
        self.tell(&format!("worker {number} joins tenant{tenant}"));
        Ok(())
    }

    fn join_if_room(&mut self, tenant: usize) -> Outcome {
        if self.world.processes() < self.settings.processes_max {
            self.join(tenant)
        } else {
            Ok(())
        }
    }

    fn one_leaves(&mut self, tenant: usize) -> Outcome {
        if let Some(index) = self.any_mortal(tenant) {
            let number = self.world.tenants[tenant].workers[index].number;
            self.tell(&format!("worker {number} leaves tenant{tenant}"));
            let is_dropped = self.world.random.bool();
            self.world.leave(tenant, index, is_dropped)?;
        }
        Ok(())
    }

    fn one_dies_at_rest(&mut self, tenant: usize) -> Outcome {
        if let Some(index) = self.any_mortal(tenant) {
            let number = self.world.tenants[tenant].workers[index].number;
            self.tell(&format!("worker {number} of tenant{tenant} is killed at rest"));
            self.kill(number, "worker at rest")?;
        }
        Ok(())
    }

    fn any_mortal(&mut self, tenant: usize) -> Option<usize> {
        let workers = &self.world.tenants[tenant].workers;
        let mortals: Vec<usize> =
            (0..workers.len()).filter(|index| !workers[*index].is_veteran).collect();
        self.world.random.choice(mortals)
    }

    /// After changes of who lives: new communicators, and memory shared with all.
    fn gather(&mut self, index: usize) -> Outcome {
        if self.world.tenants[index].workers.is_empty() {
            return Ok(());
        }
        self.world.hear(index)?;
        let has_ended = self.world.random.u8(..6) == 0;
        if self.world.tenants[index].is_broken || has_ended {
            self.world.regroup(index)?;
        } else if self.world.random.u8(..3) > 0 {
            return Ok(());
        }
        self.share(index)?;
        self.world.check(index)
    }
}
