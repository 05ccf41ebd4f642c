//! A CEL expression over `args` and `tool`, and what judging with it may cost.
//!
//! The expression is the operator's, the arguments are a model's: however large, deep or odd they are, a judgement ends soon
//! and takes little stack and memory. Loops multiply, so what they may run over shrinks with their depth.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use cel::common::ast::{ComprehensionExpr, EntryExpr, Expr};
use cel::objects::Key;
use cel::parser::Parser;
use cel::{Context, Env, IdedExpr, Value};
use serde_json::Value as Json;

use crate::agents::tools::arguments;

/// Bytes of an expression.
const TEXT_MAX: usize = 4096;
/// How deep an expression may be nested.
const DEPTH_MAX: usize = 32;
/// How deep loops (`all`, `exists`, `map` and the like) may stand in each other.
const LOOPS_MAX: u32 = 3;
/// Bytes of arguments that are judged.
const ARGUMENTS_MAX: usize = 1 << 20;
/// Values per loop, multiplied over the loops that stand in each other, times the bytes that each pass may look at.
const WORK_MAX: u64 = 1 << 24;

/// Names that stand for types.
const TYPES: [&str; 10] = [
    "bool",
    "bytes",
    "double",
    "dyn",
    "int",
    "list",
    "map",
    "null_type",
    "string",
    "uint",
];
/// Functions and methods of CEL's standard library; what macros and operators become is no name of a caller's.
const FUNCTIONS: [&str; 13] = [
    "bool",
    "bytes",
    "contains",
    "double",
    "dyn",
    "endsWith",
    "int",
    "matches",
    "size",
    "startsWith",
    "string",
    "type",
    "uint",
];

/// A compiled expression.
pub(super) struct Expression {
    root: IdedExpr,
    env: Arc<Env>,
    /// Loops that stand in each other.
    loops: u32,
    /// Elements of its own lists and maps: loops run over them too.
    literals: u64,
}

impl fmt::Debug for Expression {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Expression").finish_non_exhaustive()
    }
}

impl Expression {
    /// # Errors
    /// Why the text is no expression that can be judged with, for the one who declared it.
    pub(super) fn compile(text: &str) -> Result<Self, String> {
        if text.trim().is_empty() {
            return Err("must be always, never, or a CEL expression".to_owned());
        }
        if text.len() > TEXT_MAX {
            return Err(format!("must be at most {TEXT_MAX} bytes long"));
        }
        let root = Parser::new()
            .max_recursion_depth(DEPTH_MAX as u16)
            .parse(text)
            .map_err(|e| format!("must be always, never, or a CEL expression: {}", first_line(&e)))?;
        let mut seen = Seen {
            env: Arc::new(Env::stdlib()),
            bound: Vec::new(),
            literals: 0,
        };
        let loops = seen.expression(&root, DEPTH_MAX)?;
        if loops > LOOPS_MAX {
            return Err(format!("must not have more than {LOOPS_MAX} loops in each other"));
        }
        Ok(Self {
            root,
            env: seen.env,
            loops,
            literals: seen.literals,
        })
    }

    /// Whether it is true for a call.
    ///
    /// # Errors
    /// Why that is not known, for the model; nothing of the arguments.
    pub(super) fn holds(&self, tool: &str, arguments: &str) -> Result<bool, String> {
        if arguments.len() > ARGUMENTS_MAX {
            return Err(format!("the arguments are longer than {ARGUMENTS_MAX} bytes"));
        }
        let mut values = self.literals;
        let args = cel_of(arguments::value(arguments)?, &mut values);
        let work = values
            .saturating_pow(self.loops)
            .saturating_mul(arguments.len() as u64);
        if work > WORK_MAX {
            return Err("the arguments are too many for the rule that judges them".to_owned());
        }
        let mut context = Context::with_env(Arc::clone(&self.env));
        context.add_variable_from_value("args", args);
        context.add_variable_from_value("tool", tool);
        match Value::resolve(&self.root, &context) {
            Ok(Value::Bool(holds)) => Ok(holds),
            // Errors hold values: nothing of them is told.
            Ok(_) | Err(_) => Err("the arguments are not what the rule that judges them expects".to_owned()),
        }
    }
}

/// Of several complaints about a text, the first; without the picture of the place.
fn first_line(errors: &cel::ParseErrors) -> String {
    let text = errors.to_string();
    let line = text.lines().map(str::trim).find(|line| !line.is_empty());
    line.unwrap_or("it cannot be read").to_owned()
}

/// JSON as CEL sees it; `values` counts what a loop may run over.
fn cel_of(json: Json, values: &mut u64) -> Value {
    *values += 1;
    match json {
        Json::Null => Value::Null,
        Json::Bool(it) => Value::Bool(it),
        Json::Number(it) => match (it.as_i64(), it.as_u64()) {
            (Some(it), _) => Value::Int(it),
            (None, Some(it)) => Value::UInt(it),
            // A number of JSON is finite, so it is one of the three.
            (None, None) => it.as_f64().map_or(Value::Null, Value::Float),
        },
        Json::String(it) => Value::from(it),
        Json::Array(items) => {
            let items: Vec<Value> = items.into_iter().map(|it| cel_of(it, values)).collect();
            Value::List(Arc::new(items))
        }
        Json::Object(members) => {
            let members: HashMap<Key, Value> = members
                .into_iter()
                .map(|(name, it)| (Key::from(name), cel_of(it, values)))
                .collect();
            Value::Map(cel::objects::Map {
                map: Arc::new(members),
            })
        }
    }
}

/// A walk over an expression before it is ever evaluated.
struct Seen {
    env: Arc<Env>,
    /// Variables of the loops around.
    bound: Vec<String>,
    literals: u64,
}

impl Seen {
    /// Loops that stand in each other, here and below.
    fn expression(&mut self, it: &IdedExpr, levels: usize) -> Result<u32, String> {
        let levels = levels
            .checked_sub(1)
            .ok_or_else(|| format!("must not be nested deeper than {DEPTH_MAX}"))?;
        match &it.expr {
            Expr::Unspecified => Err("must be a whole expression".to_owned()),
            Expr::Literal(_) => Ok(0),
            Expr::Ident(name) => self.known(name).map(|()| 0),
            Expr::Select(select) => self.expression(&select.operand, levels),
            Expr::Struct(it) => Err(format!("there is no type {}", it.type_name)),
            Expr::List(list) => {
                self.literals += list.elements.len() as u64;
                self.all(list.elements.iter(), levels)
            }
            Expr::Map(map) => {
                self.literals += map.entries.len() as u64;
                let mut most = 0;
                for entry in &map.entries {
                    let EntryExpr::MapEntry(entry) = &entry.expr else {
                        return Err("must be a whole expression".to_owned());
                    };
                    most = self.all([&entry.key, &entry.value], levels)?.max(most);
                }
                Ok(most)
            }
            Expr::Call(call) => {
                let is_name = call.func_name.starts_with(|c: char| c.is_ascii_alphabetic());
                if is_name && !FUNCTIONS.contains(&call.func_name.as_str()) {
                    return Err(format!("there is no function {}", call.func_name));
                }
                if call.func_name == "matches" {
                    self.pattern(call.args.last())?;
                }
                self.all(call.target.as_deref().into_iter().chain(&call.args), levels)
            }
            Expr::Comprehension(it) => self.each(it, levels),
        }
    }

    fn all<'a>(
        &mut self,
        them: impl IntoIterator<Item = &'a IdedExpr>,
        levels: usize,
    ) -> Result<u32, String> {
        them.into_iter()
            .try_fold(0, |most, it| Ok(self.expression(it, levels)?.max(most)))
    }

    fn each(&mut self, it: &ComprehensionExpr, levels: usize) -> Result<u32, String> {
        let outside = self.all([&it.iter_range, &it.accu_init], levels)?;
        let before = self.bound.len();
        self.bound.push(it.iter_var.clone());
        self.bound.extend(it.iter_var2.clone());
        self.bound.push(it.accu_var.clone());
        let inside = self.all([&it.loop_cond, &it.loop_step, &it.result], levels)?;
        self.bound.truncate(before);
        Ok(outside.max(inside + 1))
    }

    fn known(&self, name: &str) -> Result<(), String> {
        let known = matches!(name, "args" | "tool")
            || TYPES.contains(&name)
            || self.bound.iter().any(|bound| bound == name);
        if known {
            Ok(())
        } else {
            Err(format!("there is no {name}; an expression knows args and tool"))
        }
    }

    /// A pattern is the operator's, never the model's: making one ready costs what it asks for.
    fn pattern(&self, pattern: Option<&IdedExpr>) -> Result<(), String> {
        let Some(IdedExpr {
            expr: Expr::Literal(literal),
            ..
        }) = pattern
        else {
            return Err("matches takes a literal pattern".to_owned());
        };
        let mut context = Context::with_env(Arc::clone(&self.env));
        let probe = Parser::new()
            .parse("''.matches(pattern)")
            .map_err(|e| first_line(&e))?;
        context.add_variable_as_val("pattern", literal.to_val().into_owned());
        match Value::resolve(&probe, &context) {
            Ok(_) => Ok(()),
            // The last line says what is wrong, those before it show where.
            Err(e) => Err(format!(
                "has a pattern that is none: {}",
                e.to_string().lines().last().unwrap_or_default()
            )),
        }
    }
}

#[cfg(test)]
mod tests;
