//! `iop-edge keys new`: a secret for the client, its digest for the configuration. The secret is kept nowhere.

use std::process::ExitCode;

use clap::{Args, Subcommand};
use iop_edge::config::{Role, digest, hex, is_key_name};
use rustls::crypto::{GetRandomFailed, SecureRandom};

#[derive(Debug, Subcommand)]
pub(super) enum Keys {
    /// Prints a new secret, once, and the line of [auth] keys that admits it.
    New(New),
}

#[derive(Debug, Args)]
pub(super) struct New {
    /// What the key is called in logs.
    #[arg(value_parser = key_name)]
    name: String,
    /// What the key may do: inference, operator, admin, metrics.
    #[arg(long, value_delimiter = ',', value_parser = role, default_value = "inference")]
    roles: Vec<Role>,
}

fn key_name(text: &str) -> Result<String, String> {
    if is_key_name(text) {
        Ok(text.to_owned())
    } else {
        Err(String::from("must match [A-Za-z0-9._-]{1,64}"))
    }
}

fn role(text: &str) -> Result<Role, String> {
    Role::parse(text).ok_or_else(|| String::from("must be inference, operator, admin or metrics"))
}

pub(super) fn run(keys: &Keys) -> ExitCode {
    let Keys::New(new) = keys;
    let Ok(secret) = secret(rustls::crypto::ring::default_provider().secure_random) else {
        eprintln!("the system gives no random bytes");
        return ExitCode::FAILURE;
    };
    eprintln!("The secret, shown this once, and the line for [auth] keys = [ … ]:");
    println!("{secret}");
    println!("{}", toml_line(new, &secret));
    ExitCode::SUCCESS
}

fn toml_line(new: &New, secret: &str) -> String {
    let roles: Vec<String> = new.roles.iter().map(|r| format!("\"{r}\"")).collect();
    let digest = hex(&digest(secret));
    format!(
        "{{ name = \"{}\", secret_sha256 = \"{digest}\", roles = [{}] }},",
        new.name,
        roles.join(", ")
    )
}

/// 43 letters and digits: 256 bits. Bytes that would favour some letters are thrown away.
fn secret(random: &dyn SecureRandom) -> Result<String, GetRandomFailed> {
    const LETTERS: &[u8; 62] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789";
    const LENGTH: usize = 43;
    let fair = u8::MAX - u8::MAX % 62;
    let mut secret = String::from("iop-");
    let mut left = LENGTH;
    while left > 0 {
        let mut bytes = [0; 64];
        random.fill(&mut bytes)?;
        let letters = bytes.iter().filter(|b| **b < fair).take(left);
        let before = secret.len();
        secret.extend(letters.map(|b| char::from(LETTERS[usize::from(b % 62)])));
        left -= secret.len() - before;
    }
    Ok(secret)
}

#[cfg(test)]
mod tests {
    use super::*;
    use iop_edge::config::{Roles, Settings, World};

    #[test]
    fn a_new_key_is_admitted_by_the_line_printed_with_it() {
        let random = rustls::crypto::ring::default_provider().secure_random;
        let one = secret(random).unwrap();
        assert_ne!(one, secret(random).unwrap());
        let (prefix, rest) = one.split_at(4);
        assert!(
            prefix == "iop-" && rest.len() == 43 && rest.bytes().all(|b| b.is_ascii_alphanumeric()),
            "{one}"
        );

        let new = New {
            name: String::from("ops-1"),
            roles: vec![Role::Operator, Role::Metrics],
        };
        let line = toml_line(&new, &one);
        assert!(!line.contains(&one));
        let s = Settings::parse("f", &format!("[auth]\nkeys = [\n{line}\n]\n"), &World::real())
            .ok()
            .unwrap();
        assert_eq!((&*s.keys[0].name, s.keys[0].digest), ("ops-1", digest(&one)));
        assert_eq!(s.keys[0].roles, Roles::of(&[Role::Operator, Role::Metrics]));
    }
}
