//! The pauses and the resume that follow from a decision.

use std::sync::Arc;
use std::time::Duration;

use crate::decision::scene::Scene;
use tenants::checkpoints::Checkpointer;
use tenants::coordinator::{Coordinator, Event, Interrupt, LostImports, Options, Outcome, Trouble};
use tenants::identity::TenantName;
use tenants::run_dir::RunDir;

/// The options of a switch to a tenant.
#[derive(Clone, Debug, Default)]
pub struct SwitchOptions {
    /// The longest wait while a tenant that holds the GPUs is in a turn.
    pub wait: Duration,
    /// The timeout of each phase of pauses and resumes. None: each phase has its own.
    pub timeout: Option<Duration>,
    /// Calls the switch off if it is raised before the first point of no return, or while the switch waits.
    pub interrupt: Option<Interrupt>,
    /// Called on the calling thread while the switch waits and holds no lock. If it returns true, the switch is called off.
    pub asks: Option<fn() -> bool>,
    /// May the tenant resume without memory that it had imported from processes that have ended since?
    pub lost_imports: LostImports,
    /// The interface to the driver's calls about other processes. Pauses that remove contexts need it, and so do their resumes.
    pub checkpointer: Option<Arc<dyn Checkpointer>>,
    /// Report what would be done, and change nothing.
    pub is_dry: bool,
}

/// The pauses and the resume of one decision.
pub(super) struct Acting<'a> {
    pub(super) run_dir: &'a RunDir,
    /// The tenant that the decision is for.
    pub(super) tenant: &'a TenantName,
    pub(super) options: &'a SwitchOptions,
    /// The tenants whose contexts leave too when they are paused for this tenant.
    pub(super) deep: Vec<&'a TenantName>,
}

/// The coordinator that pauses or resumes `tenant` with these options.
pub(super) fn coordinator(
    run_dir: &RunDir,
    tenant: &TenantName,
    options: &SwitchOptions,
) -> Coordinator {
    to_depth(run_dir, tenant, options, false)
}

/// Returns the same coordinator. If `is_deep`, it removes contexts too.
pub(super) fn to_depth(
    run_dir: &RunDir,
    tenant: &TenantName,
    options: &SwitchOptions,
    is_deep: bool,
) -> Coordinator {
    let options = Options {
        is_deep,
        timeout: options.timeout,
        interrupt: options.interrupt.clone(),
        lost_imports: options.lost_imports,
        contexts: options.checkpointer.clone().map(sublet_deep::contexts),
        passes_by_memory_waits: true,
        room: Some(tenants::keep::room),
        ..Options::default()
    };
    Coordinator::new(run_dir.clone(), tenant.clone(), options)
}

pub(super) fn busy(tenant: &TenantName, reasons: &[String]) -> Trouble {
    Trouble::Busy { tenant: tenant.clone(), why: reasons.join("; ") }
}

/// Returns the error for `tenant`, which fits nowhere. Nothing is refused for good while a tenant does not answer: the memory
/// that it holds is not known.
pub(super) fn fits_nowhere(tenant: &TenantName, scene: &Scene, reasons: &[String]) -> Trouble {
    if scene.unheard.is_empty() {
        let held = scene.tenants.get(tenant).into_iter().flat_map(|standing| &standing.held);
        let lacks = held.filter(|(gpu, held)| scene.free_bytes.get(*gpu) < Some(&held.away_bytes));
        let gpus = lacks.map(|(gpu, _)| gpu.clone()).collect();
        return Trouble::Never { tenant: tenant.clone(), why: reasons.join("; "), gpus };
    }
    busy(tenant, reasons)
}

impl Acting<'_> {
    fn coordinator(&self, tenant: &TenantName, interrupt: Option<&Interrupt>) -> Coordinator {
        let mut options = SwitchOptions { interrupt: interrupt.cloned(), ..self.options.clone() };
        if tenant != self.tenant {
            // Only the tenant that is switched to may resume without its lost imports.
            options.lost_imports = LostImports::Refuse;
        }
        let is_deep = self.deep.contains(&tenant);
        to_depth(self.run_dir, tenant, &options, is_deep)
    }

    /// Removes the contexts of one tenant of [`Acting::deep`], and pauses it if it `runs`. A tenant that was resumed meanwhile is
    /// left alone. If the contexts stay, the tenant is paused all the same, and the result has the reason.
    pub(super) fn sink(
        &self,
        one: &TenantName,
        runs: bool,
        progress: &mut dyn FnMut(Event<'_>),
    ) -> Result<(Outcome, Option<String>), Trouble> {
        let mut coordinator = self.coordinator(one, self.options.interrupt.as_ref());
        let outcome =
            if runs { coordinator.pause(progress) } else { coordinator.deepen(progress) }?;
        let why = outcome.not_deep();
        Ok((outcome, why))
    }

    /// Pauses `victims` and resumes the tenant.
    pub(super) fn carry_out(
        &self,
        victims: &[TenantName],
        progress: &mut dyn FnMut(Event<'_>),
    ) -> Result<Vec<(TenantName, Outcome)>, Trouble> {
        let interrupt = self.options.interrupt.as_ref();
        let mut to = self.coordinator(self.tenant, interrupt);
        if let [only] = victims {
            let mut from = self.coordinator(only, interrupt);
            return match tenants::swap::swap(&mut from, &mut to, None, progress) {
                Ok(swap) => {
                    let both = [(only.clone(), swap.paused), (self.tenant.clone(), swap.resumed)];
                    Ok(both.into_iter().filter(|(_, outcome)| !was_away(outcome)).collect())
                }
                Err(Trouble::WentBack { tenant, source, .. }) => {
                    let were_paused = vec![tenant];
                    Err(Trouble::Undone { were_paused, refused_by: None, source })
                }
                Err(Trouble::NotBack { tenant, resume, source, .. }) => {
                    let stay_paused = vec![(tenant, *resume)];
                    Err(Trouble::NotUndone { stay_paused, refused_by: None, source })
                }
                Err(error) if error.is_gone() && error.is_about(only) => {
                    self.resume(to, Vec::new(), progress)
                }
                Err(error) => {
                    let refuses = (!error.is_about(self.tenant)).then_some(only);
                    Err(self.undo(Vec::new(), (refuses, error), progress))
                }
            };
        }
        let done = self.make_room(victims, progress)?;
        self.resume(to, done, progress)
    }

    /// Pauses `victims`, one at a time.
    pub(super) fn make_room(
        &self,
        victims: &[TenantName],
        progress: &mut dyn FnMut(Event<'_>),
    ) -> Result<Vec<(TenantName, Outcome)>, Trouble> {
        let interrupt = self.options.interrupt.as_ref();
        let mut done = Vec::new();
        for victim in victims {
            match self.coordinator(victim, interrupt).pause(progress) {
                Ok(outcome) if was_away(&outcome) => {}
                Ok(outcome) => done.push((victim.clone(), outcome)),
                // It has ended, and so its memory is free.
                Err(error) if error.is_gone() => {}
                Err(error) => {
                    let paused = done.into_iter().map(|(victim, _)| victim).collect();
                    return Err(self.undo(paused, (Some(victim), error), progress));
                }
            }
        }
        Ok(done)
    }

    fn resume(
        &self,
        mut to: Coordinator,
        mut done: Vec<(TenantName, Outcome)>,
        progress: &mut dyn FnMut(Event<'_>),
    ) -> Result<Vec<(TenantName, Outcome)>, Trouble> {
        match to.resume(progress) {
            Ok(outcome) => {
                done.push((self.tenant.clone(), outcome));
                Ok(done)
            }
            Err(error) => {
                let paused = done.into_iter().map(|(victim, _)| victim).collect();
                Err(self.undo(paused, (None, error), progress))
            }
        }
    }

    /// Resumes the tenants that were paused, the last first, after `error`. Nobody can call that off.
    fn undo(
        &self,
        paused: Vec<TenantName>,
        (refuses, error): (Option<&TenantName>, Trouble),
        progress: &mut dyn FnMut(Event<'_>),
    ) -> Trouble {
        // A pause that was called off would have succeeded.
        let is_called_off = matches!(error, Trouble::CalledOff { .. });
        let refused_by = refuses.filter(|_| !is_called_off).cloned();
        let mut stay_paused = Vec::new();
        for victim in paused.iter().rev() {
            if let Err(error) = self.coordinator(victim, None).resume(progress) {
                stay_paused.push((victim.clone(), error));
            }
        }
        let source = Box::new(error);
        if stay_paused.is_empty() {
            Trouble::Undone { were_paused: paused, refused_by, source }
        } else {
            Trouble::NotUndone { stay_paused, refused_by, source }
        }
    }
}

/// Had another process paused it by then? Then that process resumes it.
fn was_away(outcome: &Outcome) -> bool {
    matches!(outcome, Outcome::AlreadyPaused { .. })
}
