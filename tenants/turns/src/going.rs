//! The acts of a process that may go. With the lock, it pauses others or removes their contexts, resumes its own tenant, and
//! writes the history.

use super::Switched;
use super::acting::{Acting, SwitchOptions};
use super::queue::{Queue, Seen};
use crate::clock::now_us;
use crate::decision::scene::Wish;
use crate::turn_files::TurnLock;
use tenants::coordinator::{Event, Trouble};
use tenants::error_text::chain;
use tenants::identity::TenantName;

impl Queue {
    /// Removes the contexts of `one`, and writes that into the history.
    pub(super) fn sink(
        &self,
        lock: &TurnLock,
        seen: Seen,
        one: &TenantName,
        options: &SwitchOptions,
        progress: &mut dyn FnMut(Event<'_>),
    ) -> Result<Switched, Trouble> {
        let Seen { scene, mut history, decision, .. } = seen;
        let runs =
            |name: &TenantName| scene.tenants.get(name).is_some_and(|standing| standing.is_active);
        if runs(one) {
            let mut leaving = history.clone();
            leaving.is_leaving(one);
            self.turns.keep_history(lock, &leaving)?;
        }
        let deep = vec![one];
        let acting = Acting { run_dir: &self.run_dir, tenant: &self.tenant, options, deep };
        let (began_us, mut lines) = (now_us(), decision.reasons.clone());
        let done = acting.sink(one, runs(one), progress);
        let now_us = now_us();
        let took_us = now_us.saturating_sub(began_us);
        if done.is_ok() && runs(one) {
            lines.extend(history.left(one, &scene, now_us));
        }
        match &done {
            Ok((_, None)) => {}
            Ok((_, Some(why))) => {
                lines.push(history.kept_contexts(one, why, took_us, now_us));
            }
            Err(error) if runs(one) => {
                // If it is paused after all, it is to be resumed automatically.
                history.is_leaving(one);
                lines.push(history.refused(one, &chain(error), took_us, now_us));
            }
            Err(error) => {
                lines.push(history.kept_contexts(one, &chain(error), took_us, now_us));
            }
        }
        let done = done.and_then(|(outcome, why)| {
            let not_deep = |why| Trouble::NotDeep { tenant: one.clone(), why };
            why.map_or(Ok(outcome), |why| Err(not_deep(why)))
        });
        let kept = self.turns.keep_history(lock, &history);
        let unrecorded = kept.and(self.turns.log(Some(lock), &lines)).err();
        let unrecorded = unrecorded.map(|error| chain(&error));
        let outcome = done.map_err(|error| Trouble::Undone {
            were_paused: Vec::new(),
            refused_by: Some(one.clone()),
            source: Box::new(error),
        })?;
        let (victims, changes) = (vec![one.clone()], vec![(one.clone(), outcome)]);
        Ok(Switched { had_them: runs(&self.tenant), victims, reasons: lines, changes, unrecorded })
    }

    /// Pauses `victims`, resumes this process's tenant, and writes that into the history.
    pub(super) fn go(
        &mut self,
        lock: &TurnLock,
        seen: Seen,
        victims: &[TenantName],
        options: &SwitchOptions,
        progress: &mut dyn FnMut(Event<'_>),
    ) -> Result<Switched, Trouble> {
        let Seen { scene, mut history, decision, .. } = seen;
        let had_them = scene.tenants.get(&self.tenant).is_some_and(|standing| standing.is_active);
        if !victims.is_empty() {
            let mut leaving = history.clone();
            for victim in victims {
                leaving.is_leaving(victim);
            }
            self.turns.keep_history(lock, &leaving)?;
        }
        let may_leave = |victim: &&TenantName| {
            let standing = scene.tenants.get(*victim);
            decision.contexts_leave && standing.is_some_and(|standing| standing.contexts.may_leave)
        };
        let deep = victims.iter().filter(may_leave).collect();
        let acting = Acting { run_dir: &self.run_dir, tenant: &self.tenant, options, deep };
        let began_us = now_us();
        let done = if had_them {
            acting.make_room(victims, progress)
        } else {
            acting.carry_out(victims, progress)
        };
        let changes = match done {
            Ok(changes) => changes,
            Err(error) => {
                let mut lines = vec![format!("'{}' did not come: {error}", self.tenant)];
                if let Trouble::NotUndone { stay_paused, .. } = &error {
                    // It is resumed automatically, if its settings say so.
                    for (victim, _) in stay_paused {
                        history.is_leaving(victim);
                    }
                }
                if let Some((victim, why)) = error.refusal() {
                    let now_us = now_us();
                    let took_us = now_us.saturating_sub(began_us);
                    lines.push(history.refused(victim, &chain(why), took_us, now_us));
                }
                self.tell(Some(lock), &lines);
                if let Err(error) = self.turns.keep_history(lock, &history) {
                    tracing::warn!(%error, "what has been is not known to later decisions about turns");
                }
                return Err(error);
            }
        };
        let mut lines = decision.reasons.clone();
        let now_us = now_us();
        let has_left = |victim: &&TenantName| changes.iter().any(|(name, _)| name == *victim);
        for victim in victims.iter().filter(has_left) {
            lines.extend(history.left(victim, &scene, now_us));
        }
        if !had_them {
            history.came(&self.tenant, now_us);
        } else if !victims.is_empty() {
            history.got_more(&self.tenant, &scene, now_us);
        }
        let is_turn = self.wish == Wish::Turn;
        if is_turn {
            let has_turn = scene.tenants.get(&self.tenant).is_some_and(|own| own.has_turn);
            history.began_turn(&self.tenant, has_turn, now_us);
        }
        // A tenant that does not answer now may be paused for another.
        if let Ok(live) = self.run_dir.live_tenants() {
            history.keep_only(&live);
        }
        // The switch is done, even if the history cannot be written.
        let said = if is_turn { self.say(false) } else { Ok(()) };
        let kept = self.turns.keep_history(lock, &history);
        let is_worth_a_line = !had_them || !victims.is_empty();
        let logged = if is_worth_a_line { self.turns.log(Some(lock), &lines) } else { Ok(()) };
        let unrecorded = said.and(kept).and(logged).err().map(|error| chain(&error));
        if let Some(why) = &unrecorded {
            tracing::warn!(tenant = %self.tenant, %why, "a switch is done, and not written down");
        }
        let victims = victims.to_vec();
        Ok(Switched { had_them, victims, reasons: lines, changes, unrecorded })
    }
}
