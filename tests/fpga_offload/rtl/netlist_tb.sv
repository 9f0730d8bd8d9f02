// The multiplier of V by its RTL and by its mapped netlist, on the same random numbers.
`timescale 1ns / 1ps
module netlist_tb;
    reg clk = 0;
    reg [31:0] p;
    reg [18:0] v;
    wire [31:0] by_rtl, by_netlist;
    integer cycle, mismatches = 0, nonzero = 0, seed = 1;
    mul_single_wide rtl(.clk(clk), .p(p), .v(v), .y(by_rtl));
    mul_single_wide_netlist netlist(.clk(clk), .p(p), .v(v), .y(by_netlist));
    always #5 clk = !clk;
    initial begin
        p = 0;
        v = 0;
        #200;                                  // the cells' global reset
        for (cycle = 0; cycle < 20000; cycle = cycle + 1) begin
            @(negedge clk);
            if (cycle > 8 && by_rtl !== by_netlist) mismatches = mismatches + 1;
            if (by_netlist !== 0 && ^by_netlist !== 1'bx) nonzero = nonzero + 1;
            p = $random(seed);
            v = $random(seed);
            if (cycle % 4 != 0) begin          // of the size of weights and values
                p[31:23] = {1'b0, 8'd100 + p[27:23]};
                v[17:10] = 8'd110 + v[14:10];
            end
        end
        $display("mismatches %0d nonzero %0d", mismatches, nonzero);
        $finish;
    end
endmodule
