//! `sublet budget`, which shows and changes the memory that a tenant may hold on each GPU. Also the checks of budgets before
//! `sublet run` starts a program.

use std::process::ExitCode;

use tenants::budget::{BudgetReport, Budgets, Which, budgets, change};
use tenants::coordinator::{Coordinator, GpuBudget, Options, TenantStats, Trouble};
use tenants::identity::TenantName;
use tenants::run_dir::RunDir;
use tenants::size::Size;

use crate::args::BudgetArgs;
use crate::environment::Environment;
use crate::failure::{EXIT_PARTIAL, EXIT_UNCHANGED, EXIT_USAGE, Failure};
use crate::gpus::Gpus;
use crate::output::{self, Output};
use crate::units;
use crate::view::View;

pub(crate) fn budget(
    args: &BudgetArgs,
    run_dir: RunDir,
    output: &mut Output,
) -> Result<ExitCode, Failure> {
    let options = Options::default();
    let coordinator = Coordinator::new(run_dir, args.tenant.clone(), options);
    let report = match one_of(&args.budgets)? {
        None => budgets(&coordinator)?,
        Some(changes) => {
            check(&changes)?;
            Some(change(&coordinator, &changes)?)
        }
    };
    if args.show.json {
        let none = BudgetReport::none(&args.tenant);
        output.json(report.as_ref().unwrap_or(&none))?;
    } else if let Some(report) = &report {
        render(report, output);
    } else {
        output.line(format!("tenant '{}' has no budgets", args.tenant));
    }
    let is_whole = report.is_none_or(|report| report.failures.is_empty());
    Ok(if is_whole { ExitCode::SUCCESS } else { ExitCode::from(EXIT_PARTIAL) })
}

/// Joins several options of the command line into one.
fn one_of(given: &[Budgets]) -> Result<Option<Budgets>, Failure> {
    let texts: Vec<_> = given.iter().map(ToString::to_string).collect();
    if texts.is_empty() {
        return Ok(None);
    }
    let all = texts.join(",").parse();
    all.map(Some).map_err(|error| Failure::of(&error, EXIT_USAGE))
}

fn render(report: &BudgetReport, output: &mut Output) {
    let header = ["GPU", "BUDGET", "HELD", "ABOVE", "TOTAL", "UUID"];
    let mut table = output::table(&header, &[0, 1, 2, 3, 4]);
    for gpu in &report.gpus {
        table.add_row([
            gpu.index.map_or_else(|| "-".to_owned(), |index| index.to_string()),
            gpu.budget_bytes.map_or_else(|| "none".to_owned(), units::bytes),
            units::bytes(gpu.held_bytes),
            units::bytes_or_dash(gpu.over_bytes()),
            units::bytes_or_dash(gpu.total_bytes),
            gpu.gpu.clone(),
        ]);
    }
    output.table(&table);
    for gpu in report.gpus.iter().filter(|gpu| gpu.over_bytes() > 0) {
        output.line(above(&report.tenant, gpu));
    }
    for which in unseen(report) {
        output.line(format!(
            "no process of tenant '{}' uses {which} yet; the budget there has no effect until one does",
            report.tenant
        ));
    }
    for failure in &report.failures {
        output.line(format!("NOT COUNTED: {failure}"));
    }
}

fn label(gpu: &GpuBudget) -> String {
    gpu.index.map_or_else(|| gpu.gpu.clone(), |index| format!("GPU {index}"))
}

fn above(tenant: &str, gpu: &GpuBudget) -> String {
    format!(
        "tenant '{tenant}' holds {} more on {} than its budget: paged memory is freed, other memory stays, and new \
         allocations there fail until it fits",
        units::bytes(gpu.over_bytes()),
        label(gpu)
    )
}

/// Returns the GPUs with budgets that no process of the tenant sees.
fn unseen(report: &BudgetReport) -> Vec<Which> {
    let is_seen = |which: Which| match which {
        Which::Every => true,
        Which::Index(index) => report.gpus.iter().any(|gpu| gpu.index == Some(index)),
        Which::Uuid(uuid) => report.gpus.iter().any(|gpu| gpu.gpu == uuid.to_string()),
    };
    report.budgets.iter().map(|(which, _)| which).filter(|which| !is_seen(*which)).collect()
}

/// Returns a line for `sublet ps` and `sublet stats` for each GPU with a budget.
pub(crate) fn remarks(tenant: &TenantStats) -> impl Iterator<Item = String> {
    tenant.budgets.iter().filter_map(|gpu| {
        let budget_bytes = gpu.budget_bytes?;
        let over = match gpu.over_bytes() {
            0 => String::new(),
            over => {
                format!(", {} above it: new allocations fail until it fits", units::bytes(over))
            }
        };
        Some(format!(
            "{} {}: holds {} of its budget of {}{over}",
            tenant.tenant,
            label(gpu),
            units::bytes(gpu.held_bytes),
            units::bytes(budget_bytes)
        ))
    })
}

/// Refuses a budget that is smaller than any allocation. Refuses a number that no GPU of this machine has, if the machine lists
/// its GPUs.
fn check(budgets: &Budgets) -> Result<(), Failure> {
    let least = Size(2 << 20);
    let mut sizes = budgets.iter().filter_map(|(_, budget)| budget);
    if let Some(bytes) = sizes.find(|bytes| *bytes < least.0) {
        return Err(Failure::new(
            format!(
                "a budget of {} holds nothing, because GPU memory comes in {least}: did you mean {bytes}GiB?",
                Size(bytes)
            ),
            EXIT_USAGE,
        ));
    }
    budgets.check(|| Gpus::look().count()).map_err(|error| Failure::of(&error, EXIT_USAGE))
}

/// Returns the budgets that `sublet run` puts into the environment of a tenant's processes, after its checks, or none
/// if none was given. `warn` is called with warnings.
pub(crate) fn for_run(
    tenant: &TenantName,
    given: &[Budgets],
    environment: &Environment,
    run_dir: &RunDir,
    warn: &mut dyn FnMut(&str),
) -> Result<Option<Budgets>, Failure> {
    let wanted = match (one_of(given)?, &environment.settings().budgets) {
        (Some(wanted), _) => wanted,
        (None, None) => return Ok(None),
        (None, Some(wanted)) => wanted.clone(),
    };
    check(&wanted)?;
    let options = Options::default();
    let own = budgets(&Coordinator::new(run_dir.clone(), tenant.clone(), options));
    match own {
        Ok(Some(found)) if found.budgets != wanted => {
            return Err(Failure::new(
                format!(
                    "tenant '{tenant}' runs with the budget '{}', and a tenant has one for all its processes: change it with \
                     `sublet budget {tenant} {wanted}`, or leave --budget out",
                    found.budgets
                ),
                EXIT_UNCHANGED,
            ));
        }
        Ok(None) if run_dir.live_tenants()?.contains(tenant) => {
            return Err(Failure::new(
                format!(
                    "tenant '{tenant}' runs without a budget: give it one with `sublet budget {tenant} {wanted}`, and leave \
                     --budget out"
                ),
                EXIT_UNCHANGED,
            ));
        }
        Ok(_) | Err(Trouble::NoSuchTenant { .. }) => {}
        Err(error) => return Err(error.into()),
    }
    let all = View::gather_with(run_dir, None, &Gpus::default())?.tenants.into_iter();
    let all = all.map(|found| found.stats);
    let others: Vec<_> = all.filter(|other| other.tenant != tenant.as_str()).collect();
    for text in together(tenant, &wanted, &others) {
        warn(&text);
    }
    Ok(Some(wanted))
}

/// Returns warnings about GPUs that cannot hold all budgets together. Tenants that take turns need not fit together.
fn together(tenant: &TenantName, budgets: &Budgets, others: &[TenantStats]) -> Vec<String> {
    let mut seen: Vec<&GpuBudget> = Vec::new();
    for gpu in others.iter().flat_map(|other| &other.budgets) {
        if seen.iter().all(|known| known.gpu != gpu.gpu) {
            seen.push(gpu);
        }
    }
    let mut warnings = Vec::new();
    for gpu in seen.into_iter().filter(|gpu| gpu.total_bytes > 0) {
        let Some(own_bytes) = budgets.of(gpu.uuid, gpu.index) else { continue };
        let theirs = others.iter().filter_map(|other| {
            let same = other.budgets.iter().find(|known| known.gpu == gpu.gpu)?;
            Some((other.tenant.as_str(), same.budget_bytes?))
        });
        let theirs: Vec<_> = theirs.collect();
        let all_bytes = theirs.iter().fold(own_bytes, |all, (_, bytes)| all.saturating_add(*bytes));
        if theirs.is_empty() || all_bytes <= gpu.total_bytes {
            continue;
        }
        let named: Vec<_> = theirs
            .iter()
            .map(|(name, bytes)| format!("'{name}' {}", units::bytes(*bytes)))
            .collect();
        warnings.push(format!(
            "the budgets on {} add up to {} ('{tenant}' {}, {}) and it has {}: these tenants fit there by turns, not together",
            label(gpu),
            units::bytes(all_bytes),
            units::bytes(own_bytes),
            named.join(", "),
            units::bytes(gpu.total_bytes)
        ));
    }
    warnings
}
