//! Who has to be asked before a call is made (D76, D82). The first rule that names a tool decides about it, else the default.
//! What cannot be judged is never let through.
//!
//! Pure: a judgement depends on the declaration, the tool's name and the text of the arguments alone.

mod expression;

use iop_shared::label_enum;

use self::expression::Expression;
use super::spec::check::Invalid;
use super::spec::{AgentSpec, OnInvalidArguments};

/// What happens to a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Judgement {
    /// It is made.
    Free,
    /// A person decides.
    Ask { why: AskWhy },
    /// It is not made, and the model is told why.
    Refuse { why: String },
}

label_enum! {
    /// Why a person is asked.
    pub(crate) enum AskWhy {
        Rule => "rule",
        InvalidArguments => "invalid_arguments",
    }
}

/// The approval rules of one version of an agent.
#[derive(Debug)]
pub(crate) struct Policy {
    rules: Vec<(Tools, When)>,
    default: When,
    on_invalid_arguments: OnInvalidArguments,
}

#[derive(Debug)]
enum Tools {
    All,
    One(String),
}

#[derive(Debug)]
enum When {
    Always,
    Never,
    /// Where it holds.
    Holds(Expression),
}

impl Policy {
    /// # Errors
    /// The first condition that is neither `always` nor `never` nor an expression, at its field.
    pub(crate) fn compile(spec: &AgentSpec) -> Result<Self, Invalid> {
        let rules = spec.approval_rules.iter().enumerate().map(|(i, rule)| {
            let tools = match rule.tool.as_str() {
                "*" => Tools::All,
                name => Tools::One(name.to_owned()),
            };
            Ok((
                tools,
                When::compile(&rule.when, || format!("approval_rules[{i}].when"))?,
            ))
        });
        Ok(Self {
            rules: rules.collect::<Result<_, _>>()?,
            default: When::compile(&spec.approvals.default, || "approvals.default".to_owned())?,
            on_invalid_arguments: spec.approvals.on_invalid_arguments,
        })
    }

    /// `arguments`: the text of the model.
    pub(crate) fn judge(&self, tool: &str, arguments: &str) -> Judgement {
        let named = |(tools, _): &&(Tools, When)| match tools {
            Tools::All => true,
            Tools::One(name) => name == tool,
        };
        let ask = Judgement::Ask { why: AskWhy::Rule };
        match self
            .rules
            .iter()
            .find(named)
            .map_or(&self.default, |(_, when)| when)
        {
            When::Never => Judgement::Free,
            When::Always => ask,
            When::Holds(expression) => match expression.holds(tool, arguments) {
                Ok(true) => ask,
                Ok(false) => Judgement::Free,
                Err(why) => match self.on_invalid_arguments {
                    OnInvalidArguments::Require => Judgement::Ask {
                        why: AskWhy::InvalidArguments,
                    },
                    OnInvalidArguments::Refuse => Judgement::Refuse { why },
                },
            },
        }
    }
}

impl When {
    fn compile(text: &str, field: impl Fn() -> String) -> Result<Self, Invalid> {
        match text {
            "always" => Ok(Self::Always),
            "never" => Ok(Self::Never),
            text => Expression::compile(text)
                .map(Self::Holds)
                .map_err(|why| Invalid::at(field(), why)),
        }
    }
}

#[cfg(test)]
mod tests;
