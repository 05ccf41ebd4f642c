//! Budgets as the step has drawn on them; they count with the committed step.

use std::collections::BTreeMap;

use super::Ledger;
use crate::failure::{Failure, FailureKind};
use crate::record::{Budget, Exhausted};

impl Ledger {
    pub(crate) fn use_budget(&self, name: &str, amount: u64) -> Result<(), BudgetRefused> {
        let mut inner = self.inner.lock();
        let Some(budget) = inner.budgets.get_mut(name) else {
            return Err(BudgetRefused::Undeclared(name.to_owned()));
        };
        match budget
            .used
            .checked_add(amount)
            .filter(|used| *used <= budget.limit)
        {
            Some(used) => {
                budget.used = used;
                Ok(())
            }
            None => Err(BudgetRefused::Exhausted(Exhausted {
                budget: name.to_owned(),
                used: budget.used,
                limit: budget.limit,
                decimals: 0,
            })),
        }
    }

    /// Adds what was used already, over the limit too: it cannot be refused any more.
    pub(crate) fn charge(&self, name: &str, amount: u64) -> Result<Budget, BudgetRefused> {
        let mut inner = self.inner.lock();
        let Some(budget) = inner.budgets.get_mut(name) else {
            return Err(BudgetRefused::Undeclared(name.to_owned()));
        };
        budget.used = budget.used.saturating_add(amount);
        Ok(*budget)
    }

    pub(crate) fn budget(&self, name: &str) -> Option<Budget> {
        self.inner.lock().budgets.get(name).copied()
    }

    pub(crate) fn budgets(&self) -> BTreeMap<String, Budget> {
        self.inner.lock().budgets.clone()
    }
}

/// Why a budget was not drawn on. Nothing was changed (D252).
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BudgetRefused {
    #[error("budget {0:?} is not declared")]
    Undeclared(String),
    #[error("{} of {} {} are used", .0.used, .0.limit, .0.budget)]
    Exhausted(Exhausted),
}

impl From<BudgetRefused> for crate::graph::NodeError {
    fn from(refused: BudgetRefused) -> Self {
        match refused {
            BudgetRefused::Exhausted(exhausted) => Self::from(exhausted),
            BudgetRefused::Undeclared(_) => Self::Failed(
                Failure::new(FailureKind::Configuration, refused.to_string()).code("budget_invalid"),
            ),
        }
    }
}
