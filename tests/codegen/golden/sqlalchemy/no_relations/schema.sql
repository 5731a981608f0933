create schema empty;
